// Compression to signs, and back: see ../core/compression/sign_formula.h for the arithmetic.
//
// A block of threads compresses a block of elements, which it keeps in registers between the sum of
// their magnitudes and what is left behind: values and errors are read once. Expansions and sums
// are a thread's, eight elements at a time, whose bits are a byte of a message.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../core/compression/sign_formula.h"
#include "../../core/vector_scalar.h"
#include "../machine/grid_place.h"
#include "../machine/registers.h"
#include "../machine/vector_access.h"
#include "../machine/warp.h"

namespace zero_ext::cuda {

using ScalarSignRule = core::SignRule<core::ScalarVector>;

// A block of elements among those of all parts.
struct SignPlace {
  std::int64_t part;
  std::int64_t block;   // of the part
  std::int64_t length;  // elements
  std::int64_t offset;  // of its first element from that of the first part

  // The block of that number when the blocks of all parts, `share` elements each, are counted
  // through.
  static ZERO_EXT_HOST_DEVICE SignPlace of(std::int64_t number, std::int64_t share) {
    const std::int64_t blocks = core::sign_blocks(share);
    SignPlace at{number / blocks, number % blocks, share, 0};
    const std::int64_t begin = at.block * core::kSignBlock;
    at.length = share - begin < core::kSignBlock ? share - begin : core::kSignBlock;
    at.offset = at.part * share + begin;
    return at;
  }
};

// Messages of `share` elements each, one behind the other.
struct SignMessages {
  const std::uint8_t* bytes;
  std::int64_t share;
  std::int64_t count;

  // Adds up, in their order, what all messages stand for in eight elements from `first` on.
  ZERO_EXT_HOST_DEVICE void sum(std::int64_t first, float (&terms)[kPackElements]) const {
    ZERO_EXT_UNROLL
    for (float& term : terms) term = 0.0F;
    const std::int64_t whole = core::sign_message_bytes(share);
    const std::uint8_t* codes = bytes + first / 8;
    const std::uint8_t* scales = bytes + 4 * (core::sign_words(share) + first / core::kSignBlock);
    for (std::int64_t m = 0; m < count; ++m, codes += whole, scales += whole) {
      const float scale = *reinterpret_cast<const float*>(scales);
      const std::uint32_t bits = *codes;
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        terms[k] = core::ScalarVector::add_signed(terms[k], bits >> k & 1U, scale);
      }
    }
  }
};

// What is compressed: values, or the sum of messages. load() reads those of a pack that are there;
// the others are zeros.
template <class T>
struct SignValues {
  const T* values;

  ZERO_EXT_HOST_DEVICE bool aligned(const SignPlace& at) const {
    return is_aligned(values + at.offset);
  }
  ZERO_EXT_HOST_DEVICE void load(const SignPlace& at, int first, const PackRange& range,
                                 float (&terms)[kPackElements]) const {
    const Pack<T> pack = load_pack(values + at.offset + first, range, core::from_float<T>(0.0F));
    ZERO_EXT_UNROLL
    for (int k = 0; k < kPackElements; ++k) terms[k] = core::to_float(pack.values[k]);
  }
};

struct SignSum {
  SignMessages messages;

  ZERO_EXT_HOST_DEVICE bool aligned(const SignPlace&) const { return true; }
  ZERO_EXT_HOST_DEVICE void load(const SignPlace& at, int first, const PackRange& range,
                                 float (&terms)[kPackElements]) const {
    const std::int64_t begin = at.block * core::kSignBlock + first;
    if (range.last > 0) messages.sum(begin, terms);
    ZERO_EXT_UNROLL
    for (int k = 0; k < kPackElements; ++k) terms[k] = range.holds(k) ? terms[k] : 0.0F;
  }
};

// Compresses factor * terms + errors; the errors become what that left behind.
template <class Terms>
struct CompressSigns {
  static constexpr int kThreads = static_cast<int>(core::kSignLanes);
  static constexpr int kPacks = static_cast<int>(core::kSignBlock) / (kThreads * kPackElements);
  static constexpr int kHeld = kPacks * kPackElements;  // elements of a thread

  struct Memory {
    float magnitudes[core::kSignBlock];
    float lanes[core::kSignLanes];
  };
  static constexpr int kSharedBytes = sizeof(Memory);

  Terms terms;
  float factor;
  float* errors;
  std::uint8_t* messages;
  std::int64_t share;  // elements of a part
  std::int64_t parts;

  std::int64_t blocks() const { return parts * core::sign_blocks(share); }

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    Memory& memory = *reinterpret_cast<Memory*>(machine.memory());
    const SignPlace at = SignPlace::of(machine.block(), share);
    Registers<float, kHeld, Machine::kLanes> corrected;
    each_lane(machine, [&](int here, int lane) {
      correct(at, machine.warp() * kWarpLanes + lane, corrected.at[here], memory.magnitudes);
    });
    machine.meet();
    each_lane(machine, [&](int, int lane) {
      const int own = machine.warp() * kWarpLanes + lane;
      memory.lanes[own] = lane_sum(memory.magnitudes + own);
    });
    machine.meet();
    Registers<float, 1, Machine::kLanes> sum;
    each_lane(machine, [&](int here, int lane) { sum.at[here][0] = fold(memory.lanes + lane); });
    machine.sum_of_warp(sum);
    each_lane(machine, [&](int here, int lane) {
      const float scale = core::sign_scale(sum.at[here][0], at.length);
      finish(at, machine.warp() * kWarpLanes + lane, scale, corrected.at[here]);
    });
  }

  ZERO_EXT_HOST_DEVICE PackRange range_of(const SignPlace& at, int first) const {
    return PackRange::of(first, 0, at.length, terms.aligned(at) && is_aligned(errors + at.offset));
  }

  // First element of a thread's pack.
  static ZERO_EXT_HOST_DEVICE int first_of(int thread, int pack) {
    return (pack * kThreads + thread) * kPackElements;
  }

  ZERO_EXT_HOST_DEVICE void correct(const SignPlace& at, int thread, float (&corrected)[kHeld],
                                    float* magnitudes) const {
    ZERO_EXT_UNROLL
    for (int r = 0; r < kPacks; ++r) {
      const int first = first_of(thread, r);
      const PackRange range = range_of(at, first);
      float values[kPackElements];
      terms.load(at, first, range, values);
      const Pack<float> error = load_pack(errors + at.offset + first, range, 0.0F);
      Pack<float> sizes;
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        const float value = ScalarSignRule::corrected(values[k], factor, error.values[k]);
        corrected[r * kPackElements + k] = value;
        sizes.values[k] = core::ScalarVector::abs(value);
      }
      store_pack(magnitudes + first, sizes);
    }
  }

  // Of one of the formula's lanes.
  static ZERO_EXT_HOST_DEVICE float lane_sum(const float* magnitudes) {
    float sum = 0;
    ZERO_EXT_UNROLL
    for (std::int64_t i = 0; i < core::kSignBlock; i += core::kSignLanes) sum += magnitudes[i];
    return sum;
  }

  // The formula's tree down to the span of a warp, for one lane of it.
  static ZERO_EXT_HOST_DEVICE float fold(const float* lanes) {
    constexpr int count = kThreads / kWarpLanes;
    float sums[count];
    ZERO_EXT_UNROLL
    for (int i = 0; i < count; ++i) sums[i] = lanes[i * kWarpLanes];
    ZERO_EXT_UNROLL
    for (int span = count / 2; span > 0; span /= 2) {
      ZERO_EXT_UNROLL
      for (int i = 0; i < span; ++i) sums[i] += sums[i + span];
    }
    return sums[0];
  }

  ZERO_EXT_HOST_DEVICE void finish(const SignPlace& at, int thread, float scale,
                                   const float (&corrected)[kHeld]) const {
    std::uint8_t* const message = messages + at.part * core::sign_message_bytes(share);
    if (thread == 0) {
      reinterpret_cast<float*>(message + 4 * core::sign_words(share))[at.block] = scale;
    }
    const std::int64_t bytes = 4 * core::sign_words(at.length);
    ZERO_EXT_UNROLL
    for (int r = 0; r < kPacks; ++r) {
      const int first = first_of(thread, r);
      if (first / 8 >= bytes) continue;
      const PackRange range = range_of(at, first);
      std::uint32_t bits = 0;
      Pack<float> left;
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        const float value = corrected[r * kPackElements + k];
        bits |= (range.holds(k) ? ScalarSignRule::bits(value) : 0U) << k;
        left.values[k] = ScalarSignRule::left_behind(value, scale);
      }
      message[(at.block * core::kSignBlock + first) / 8] = static_cast<std::uint8_t>(bits);
      store_pack(errors + at.offset + first, left, range);
    }
  }
};

// out = factor * sum of a part's messages [+ out], part after part.
template <class T>
struct WriteSigns {
  SignMessages messages;  // of the first part
  std::int64_t parts;
  float factor;
  bool accumulate;
  T* out;

  std::int64_t packs_of_part() const { return core::ceil_div(messages.share, kPackElements); }
  std::int64_t packs() const { return parts * packs_of_part(); }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    const std::int64_t share = messages.share;
    if (share == 0) return;
    const std::int64_t each = core::ceil_div(share, kPackElements);
    const GridPlace step = GridPlace::of(threads, 1, each);
    for (GridPlace i = GridPlace::of(thread, 1, each); i.part < parts; i.advance(step, 1, each)) {
      const std::int64_t part = i.part;
      const std::int64_t first = i.place * kPackElements;
      SignMessages own = messages;
      own.bytes += part * messages.count * core::sign_message_bytes(share);
      float terms[kPackElements];
      own.sum(first, terms);
      T* const target = out + part * share;
      const PackRange range = PackRange::of(first, 0, share, is_aligned(target));
      Pack<T> result;
      if (accumulate) result = load_pack(target + first, range, core::from_float<T>(0.0F));
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        float value = terms[k] * factor;
        if (accumulate) value = value + core::to_float(result.values[k]);
        result.values[k] = core::from_float<T>(value);
      }
      store_pack(target + first, result, range);
    }
  }
};

}  // namespace zero_ext::cuda
