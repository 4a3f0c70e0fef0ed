// Blocks of elements to integers of 4 or 8 bits, and back: see
// ../core/compression/integer_block_formula.h for the message and the arithmetic.
//
// A lane has four neighbouring words of a block, so that it moves them, and the four neighbouring
// elements of each of their fields, at once. A few lanes have a whole block of kHeldBlock elements
// in registers: what is quantized is read once. Blocks of other sizes, the short ones at the end of
// parts, and those that are not aligned go element by element and are read twice.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "../../core/compression/integer_block_formula.h"
#include "../../core/vector_scalar.h"
#include "../machine/grid_place.h"
#include "../machine/registers.h"
#include "../machine/vector_access.h"
#include "../machine/warp.h"

namespace zero_ext::cuda {

inline constexpr int kHeldBlock = 256;
inline constexpr int kQuad = 4;

template <class T>
struct alignas(sizeof(T) * kQuad) Quad {
  T values[kQuad];
};

template <class T>
ZERO_EXT_HOST_DEVICE bool is_quad_aligned(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % sizeof(Quad<T>) == 0;
}

// A block among those of all parts.
struct IntegerPlace {
  std::int64_t part;
  std::int64_t block;  // of the part
  std::int64_t begin;  // its first element, in the part
  int length;          // elements

  // The block of that number when the blocks of all parts, `share` elements each, are counted
  // through.
  static ZERO_EXT_HOST_DEVICE IntegerPlace of(std::int64_t number, std::int64_t share,
                                              std::int64_t size) {
    const std::int64_t blocks = core::ceil_div(share, size);
    const std::int64_t part = number / blocks;
    return at(part, number - part * blocks, share, size);
  }
  static ZERO_EXT_HOST_DEVICE IntegerPlace at(std::int64_t part, std::int64_t block,
                                              std::int64_t share, std::int64_t size) {
    const std::int64_t begin = block * size;
    return {part, block, begin, static_cast<int>(share - begin < size ? share - begin : size)};
  }
};

// Messages of one format and `share` elements each, one behind the other.
template <class Byte>
struct IntegerMessages {
  Byte* bytes;
  core::BlockFormat format;
  std::int64_t share;

  ZERO_EXT_HOST_DEVICE auto* words(std::int64_t message) const {
    using Word = std::conditional_t<std::is_const_v<Byte>, const std::uint32_t, std::uint32_t>;
    return reinterpret_cast<Word*>(bytes + message * format.message_bytes(share));
  }
  ZERO_EXT_HOST_DEVICE auto* scales(std::int64_t message) const {
    using Float = std::conditional_t<std::is_const_v<Byte>, const float, float>;
    return reinterpret_cast<Float*>(words(message) + format.words(share));
  }
};

// What is quantized or written. Of a block of kHeldBlock elements, whose words have kFields fields,
// `load` gives kCount times four neighbouring elements, those of one field after the other, from
// element `from` on; `element` gives any of any block.

// The values themselves; message p is made of part order[p].
template <class T>
struct IntegerValues {
  static constexpr int kMost = 1024;  // parts whose order travels with the launch

  const T* values;
  std::int64_t share;
  bool is_ordered;
  std::int16_t order[kMost];

  ZERO_EXT_HOST_DEVICE const T* block(const IntegerPlace& at) const {
    return values + (is_ordered ? order[at.part] : at.part) * share + at.begin;
  }
  ZERO_EXT_HOST_DEVICE bool aligned(const IntegerPlace& at) const {
    return is_quad_aligned(block(at));
  }
  ZERO_EXT_HOST_DEVICE float element(const IntegerPlace& at, int i) const {
    return core::to_float(block(at)[i]);
  }
  template <int kFields, int kCount>
  ZERO_EXT_HOST_DEVICE void load(const IntegerPlace& at, int from,
                                 float (&held)[kCount * kQuad]) const {
    const T* const own = block(at) + from;
    ZERO_EXT_UNROLL
    for (int f = 0; f < kCount; ++f) {
      const auto quad = *reinterpret_cast<const Quad<T>*>(own + f * (kHeldBlock / kFields));
      ZERO_EXT_UNROLL
      for (int k = 0; k < kQuad; ++k) held[f * kQuad + k] = core::to_float(quad.values[k]);
    }
  }
};

// factor * sum of messages of `Bits` bits: of part p those of numbers p * step, and `stride`
// further on each, `count` of them, in that order. The compiler knows if there is only one.
template <int Bits, bool kIsOne = false>
struct IntegerSum {
  static constexpr int kOwnFields = 32 / Bits;
  static constexpr int kOwnWords = kHeldBlock / kOwnFields;
  static constexpr std::uint32_t kMask = (1U << Bits) - 1;

  IntegerMessages<const std::uint8_t> messages;
  std::int64_t step;
  std::int64_t stride;
  std::int64_t count;
  float factor;

  ZERO_EXT_HOST_DEVICE std::int64_t terms() const { return kIsOne ? 1 : count; }
  ZERO_EXT_HOST_DEVICE bool aligned(const IntegerPlace&) const {
    const std::int64_t bytes = messages.format.message_bytes(messages.share);
    return is_aligned(messages.bytes) && bytes % static_cast<std::int64_t>(kAccessBytes) == 0;
  }

  template <bool kIsSymmetric>
  static ZERO_EXT_HOST_DEVICE float decode(std::uint32_t word, int shift, const float* scales) {
    using Code = core::IntegerCode<Bits, kIsSymmetric>;
    const float number = std::bit_cast<float>((word >> shift & kMask) | 0x4B000000U);
    return Code::template decode<core::ScalarVector, 0>(number, scales[0],
                                                        kIsSymmetric ? 0.0F : scales[1]);
  }

  ZERO_EXT_HOST_DEVICE const float* scales(const IntegerPlace& at, std::int64_t message) const {
    return messages.scales(message) + at.block * messages.format.scales();
  }
  ZERO_EXT_HOST_DEVICE const std::uint32_t* words(const IntegerPlace& at,
                                                  std::int64_t message) const {
    return messages.words(message) + messages.format.words(at.begin);
  }

  ZERO_EXT_HOST_DEVICE float element(const IntegerPlace& at, int i) const {
    const int own = static_cast<int>(messages.format.words(at.length));
    const int shift = Bits * (i / own);
    float sum = 0;
    const std::int64_t last = terms();
    ZERO_EXT_UNROLL_BY(2)
    for (std::int64_t m = 0; m < last; ++m) {
      const std::int64_t message = at.part * step + m * stride;
      const std::uint32_t word = words(at, message)[i % own];
      const float* const by = scales(at, message);
      const float value = messages.format.is_symmetric ? decode<true>(word, shift, by)
                                                       : decode<false>(word, shift, by);
      sum = m == 0 ? value : sum + value;
    }
    return sum * factor;
  }

  template <int kFields, int kCount>
  ZERO_EXT_HOST_DEVICE void load(const IntegerPlace& at, int from,
                                 float (&held)[kCount * kQuad]) const {
    const std::int64_t last = terms();
    ZERO_EXT_UNROLL_BY(2)
    for (std::int64_t m = 0; m < last; ++m) {
      const std::int64_t message = at.part * step + m * stride;
      if (messages.format.is_symmetric) {
        add<kFields, kCount, true>(words(at, message), scales(at, message), from, m == 0, held);
      } else {
        add<kFields, kCount, false>(words(at, message), scales(at, message), from, m == 0, held);
      }
    }
    ZERO_EXT_UNROLL
    for (float& value : held) value = value * factor;
  }

  template <int kFields, int kCount, bool kIsSymmetric>
  static ZERO_EXT_HOST_DEVICE void add(const std::uint32_t* source, const float* scales, int from,
                                       bool is_first, float (&held)[kCount * kQuad]) {
    ZERO_EXT_UNROLL
    for (int f = 0; f < kCount; ++f) {
      const int i = f * (kHeldBlock / kFields) + from;
      const auto quad = *reinterpret_cast<const Quad<std::uint32_t>*>(source + i % kOwnWords);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        const float value = decode<kIsSymmetric>(quad.values[k], Bits * (i / kOwnWords), scales);
        float& sum = held[f * kQuad + k];
        sum = is_first ? value : sum + value;
      }
    }
  }
};

// The extremes of values, as numbers of which the highest is looked for: the bits of magnitudes
// and, of an asymmetric code, those by which floats are ordered, upwards and downwards.
template <class Code>
struct IntegerExtremes {
  static constexpr int kKeys = Code::kIsSymmetric ? 1 : 3;

  static ZERO_EXT_HOST_DEVICE void take(float value, std::uint32_t (&keys)[kKeys]) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    highest(bits & 0x7FFFFFFFU, keys[0]);
    if constexpr (!Code::kIsSymmetric) {
      const std::uint32_t ordered = bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFU : 0x80000000U);
      highest(ordered, keys[1]);
      highest(~ordered, keys[2]);
    }
  }
  static ZERO_EXT_HOST_DEVICE void highest(std::uint32_t key, std::uint32_t& so_far) {
    so_far = key > so_far ? key : so_far;
  }

  static ZERO_EXT_HOST_DEVICE core::BlockScale scale(const std::uint32_t (&keys)[kKeys]) {
    if constexpr (Code::kIsSymmetric) {
      return Code::scale_of_magnitude(keys[0]);
    } else {
      const bool is_finite = keys[0] < core::kInfinityBits<float>;
      return Code::scale_of_range(value_of(~keys[2]), value_of(keys[1]),
                                  is_finite ? 0.0F : std::numeric_limits<float>::quiet_NaN());
    }
  }
  static ZERO_EXT_HOST_DEVICE float value_of(std::uint32_t ordered) {
    return std::bit_cast<float>(ordered ^ (ordered >> 31 != 0 ? 0x80000000U : 0xFFFFFFFFU));
  }
};

// Quantizes the source's elements, block by block: each has kGroup lanes.
template <class Source, class Code>
struct QuantizeIntegers {
  static constexpr int kThreads = 256;
  static constexpr int kSharedBytes = 0;
  static constexpr int kFields = Code::kFields;
  static constexpr int kHeldWords = kHeldBlock / kFields;
  static constexpr int kGroup = kHeldWords / kQuad;
  static constexpr int kBlocksOfWarp = kWarpLanes / kGroup;
  using Extremes = IntegerExtremes<Code>;
  using Held = float[kFields * kQuad];

  Source source;
  IntegerMessages<std::uint8_t> messages;
  std::int64_t parts;

  ZERO_EXT_HOST_DEVICE std::int64_t count() const {
    return parts * messages.format.blocks(messages.share);
  }
  std::int64_t blocks() const {
    return core::ceil_div(count(), kThreads / kWarpLanes * kBlocksOfWarp);
  }

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    const std::int64_t first =
        (machine.block() * (kThreads / kWarpLanes) + machine.warp()) * kBlocksOfWarp;
    Registers<float, kFields * kQuad, Machine::kLanes> held;
    Registers<std::uint32_t, Extremes::kKeys, Machine::kLanes> keys;
    keys.fill(0);
    each_lane(machine, [&](int here, int lane) {
      const std::int64_t number = first + lane / kGroup;
      if (number >= count()) return;
      read(place(number), lane % kGroup, held.at[here], keys.at[here]);
    });
    machine.template max_of_group<kGroup>(keys);
    each_lane(machine, [&](int here, int lane) {
      const std::int64_t number = first + lane / kGroup;
      if (number >= count()) return;
      write(place(number), lane % kGroup, Extremes::scale(keys.at[here]), held.at[here]);
    });
  }

  ZERO_EXT_HOST_DEVICE IntegerPlace place(std::int64_t number) const {
    return IntegerPlace::of(number, messages.share, messages.format.block);
  }
  ZERO_EXT_HOST_DEVICE std::uint32_t* words(const IntegerPlace& at) const {
    return messages.words(at.part) + messages.format.words(at.begin);
  }
  ZERO_EXT_HOST_DEVICE bool is_held(const IntegerPlace& at) const {
    return messages.format.block == kHeldBlock && at.length == kHeldBlock && source.aligned(at) &&
           is_quad_aligned(words(at));
  }

  ZERO_EXT_HOST_DEVICE void read(const IntegerPlace& at, int own, Held& held,
                                 std::uint32_t (&keys)[Extremes::kKeys]) const {
    if (is_held(at)) {
      source.template load<kFields, kFields>(at, own * kQuad, held);
      ZERO_EXT_UNROLL
      for (const float& value : held) Extremes::take(value, keys);
      return;
    }
    for (int i = own; i < at.length; i += kGroup) Extremes::take(source.element(at, i), keys);
  }

  static ZERO_EXT_HOST_DEVICE std::uint32_t field_of(float value, const core::BlockScale& by,
                                                     int field) {
    const float number = Code::template encode<core::ScalarVector>(value, by);
    return (std::bit_cast<std::uint32_t>(number) & Code::kMask) << (field * Code::kBits);
  }

  ZERO_EXT_HOST_DEVICE void write(const IntegerPlace& at, int own, const core::BlockScale& by,
                                  const Held& held) const {
    if (own == 0) {
      float* const scales = messages.scales(at.part) + at.block * Code::kScales;
      scales[0] = by.scale;
      if constexpr (!Code::kIsSymmetric) scales[1] = by.lowest;
    }
    std::uint32_t* const target = words(at);
    if (is_held(at)) {
      Quad<std::uint32_t> quad;
      ZERO_EXT_UNROLL
      for (int k = 0; k < kQuad; ++k) {
        std::uint32_t word = 0;
        ZERO_EXT_UNROLL
        for (int f = 0; f < kFields; ++f) word |= field_of(held[f * kQuad + k], by, f);
        quad.values[k] = by.divides() ? word : Code::kZeroWord;
      }
      *reinterpret_cast<Quad<std::uint32_t>*>(target + own * kQuad) = quad;
      return;
    }
    const int count = static_cast<int>(messages.format.words(at.length));
    for (int w = own; w < count; w += kGroup) {
      std::uint32_t word = 0;
      for (int f = 0; f < kFields; ++f) {
        const int i = w + f * count;
        word |= field_of(source.element(at, i < at.length ? i : 0), by, f);
      }
      target[w] = by.divides() ? word : Code::kZeroWord;
    }
  }
};

// out = what the sum gives [+ out], part after part; a thread has four neighbouring words.
template <class Sum, class T>
struct WriteIntegers {
  static constexpr int kFields = Sum::kOwnFields;

  Sum sum;
  std::int64_t parts;
  bool accumulate;
  T* out;

  ZERO_EXT_HOST_DEVICE std::int64_t quads_of_block() const {
    return core::ceil_div(sum.messages.format.words(sum.messages.format.block), kQuad);
  }
  std::int64_t quads() const {
    return parts * sum.messages.format.blocks(sum.messages.share) * quads_of_block();
  }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    const core::BlockFormat& format = sum.messages.format;
    const std::int64_t share = sum.messages.share;
    if (share == 0) return;
    const std::int64_t blocks = format.blocks(share);
    const std::int64_t quads = quads_of_block();
    const GridPlace step = GridPlace::of(threads, blocks, quads);
    for (GridPlace i = GridPlace::of(thread, blocks, quads); i.part < parts;
         i.advance(step, blocks, quads)) {
      const IntegerPlace at = IntegerPlace::at(i.part, i.block, share, format.block);
      write(at, static_cast<int>(i.place * kQuad), out + i.part * share + at.begin);
    }
  }

  ZERO_EXT_HOST_DEVICE void write(const IntegerPlace& at, int word, T* target) const {
    if (at.length == kHeldBlock && sum.messages.format.block == kHeldBlock && sum.aligned(at) &&
        is_quad_aligned(target)) {
      return write_held(at, word, target);
    }
    const int count = static_cast<int>(sum.messages.format.words(at.length));
    for (int w = word; w < count && w < word + kQuad; ++w) {
      for (int i = w; i < at.length; i += count) finish(sum.element(at, i), target[i]);
    }
  }

  // A few fields at a time: more would not fit in the registers.
  ZERO_EXT_HOST_DEVICE void write_held(const IntegerPlace& at, int word, T* target) const {
    constexpr int kCount = 4;
    constexpr int kWords = kHeldBlock / kFields;
    ZERO_EXT_UNROLL_BY(2)
    for (int from = word; from < kHeldBlock; from += kCount * kWords) {
      float held[kCount * kQuad];
      sum.template load<kFields, kCount>(at, from, held);
      ZERO_EXT_UNROLL
      for (int f = 0; f < kCount; ++f) {
        auto* const place = reinterpret_cast<Quad<T>*>(target + from + f * kWords);
        Quad<T> quad;
        if (accumulate) quad = *place;
        ZERO_EXT_UNROLL
        for (int k = 0; k < kQuad; ++k) finish(held[f * kQuad + k], quad.values[k]);
        *place = quad;
      }
    }
  }

  ZERO_EXT_HOST_DEVICE void finish(float value, T& result) const {
    result = core::from_float<T>(accumulate ? value + core::to_float(result) : value);
  }
};

}  // namespace zero_ext::cuda
