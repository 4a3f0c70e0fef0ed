// Compression to signs, and back: see ../../core/compression/sign_formula.h for the arithmetic.
//
// A warp takes tiles of kSignTile elements, whose bits are a word of each lane: elements move in
// accesses of 16 bytes, and so do the words of four messages, or of four tiles of one. Lanes then
// fetch the bits of the elements that they hold from each other. Words of messages that do not
// begin at multiples of 16 bytes move one by one.
//
// A block of threads compresses a block of elements, which it keeps in registers between the sum of
// their magnitudes and what is left behind: values and errors are read once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "../../core/compression/sign_formula.h"
#include "../../core/simd/vector_scalar.h"
#include "../common/nested_grid.h"
#include "sign_payload.h"

namespace zero_ext::cuda {

using ScalarSignRule = core::SignRule<core::ScalarVector>;

// What is compressed: values, or the sum of messages. load() gives a tile of a block, all of which
// is there, element() one element of a block.
using CompressTile = WarpTile<4, 8>;
using CompressTerms = CompressTile::Held<float>;

template <class T>
struct SignValues {
  const T* values;

  ZERO_EXT_HOST_DEVICE bool aligned(const SignPlace& at) const {
    return is_aligned(values + at.offset);
  }
  ZERO_EXT_HOST_DEVICE void load(const SignPlace& at, int first, CompressTerms& terms) const {
    CompressTile::Held<T> own;
    CompressTile::load(values + at.offset + first, own);
    each_lane([&](int here, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < CompressTile::kHeld; ++k) {
        terms.at[here][k] = core::to_float(own.at[here][k]);
      }
    });
  }
  ZERO_EXT_HOST_DEVICE float element(const SignPlace& at, std::int64_t i) const {
    return core::to_float(values[at.offset + i]);
  }
};

struct SignSum {
  SignMessages messages;

  ZERO_EXT_HOST_DEVICE bool aligned(const SignPlace&) const { return true; }
  ZERO_EXT_HOST_DEVICE void load(const SignPlace& at, int first, CompressTerms& terms) const {
    messages.sum<CompressTile>(at.block * core::kSignBlock + first, terms);
  }
  ZERO_EXT_HOST_DEVICE float element(const SignPlace& at, std::int64_t i) const {
    return messages.element(at.block * core::kSignBlock + i);
  }
};

// Compresses factor * terms + errors; the errors become what that left behind.
template <class Terms>
struct CompressSigns {
  static constexpr int kThreads = static_cast<int>(core::kSignLanes);
  using Tile = CompressTile;

  struct Memory {
    float magnitudes[core::kSignBlock];
    float lanes[core::kSignLanes];
  };
  static constexpr int kSharedBytes = sizeof(Memory);
  static_assert(core::kSignBlock == kSignTile * kThreads / kWarpLanes);

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
    const int first = machine.warp() * kSignTile;
    CompressTerms corrected;
    correct(at, first, corrected, memory.magnitudes + first);
    machine.meet();
    each_lane([&](int, int lane) {
      const int own = machine.warp() * kWarpLanes + lane;
      memory.lanes[own] = lane_sum(memory.magnitudes + own);
    });
    machine.meet();
    Registers<float, 1> sum;
    each_lane([&](int here, int lane) { sum.at[here][0] = fold(memory.lanes + lane); });
    sum_of_lanes(sum);
    const float scale = core::sign_scale(sum.at[0][0], at.length);
    finish(at, first, scale, corrected, memory.magnitudes + first);
  }

  // Whether all elements of a tile are there and may be moved at once. Others go one by one, by way
  // of the warp's part of the shared memory.
  ZERO_EXT_HOST_DEVICE bool is_whole(const SignPlace& at, int first) const {
    return first + kSignTile <= at.length && terms.aligned(at) && is_aligned(errors + at.offset);
  }

  ZERO_EXT_HOST_DEVICE void correct(const SignPlace& at, int first, CompressTerms& corrected,
                                    float* magnitudes) const {
    const float* const own_errors = errors + at.offset;
    if (is_whole(at, first)) {
      CompressTerms error;
      terms.load(at, first, corrected);
      Tile::load(own_errors + first, error);
      each_lane([&](int here, int) {
        ZERO_EXT_UNROLL
        for (int k = 0; k < Tile::kHeld; ++k) {
          float& value = corrected.at[here][k];
          value = ScalarSignRule::corrected(value, factor, error.at[here][k]);
        }
      });
    } else {
      each_by_lanes(0, kSignTile, [&](int, std::int64_t place) {
        const std::int64_t i = first + place;
        magnitudes[place] =
            i < at.length ? ScalarSignRule::corrected(terms.element(at, i), factor, own_errors[i])
                          : 0.0F;
      });
      meet_in_warp();
      Tile::load(magnitudes, corrected);
    }
    CompressTerms sizes;
    each_lane([&](int here, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kHeld; ++k) {
        sizes.at[here][k] = core::ScalarVector::abs(corrected.at[here][k]);
      }
    });
    Tile::store_shared(magnitudes, sizes);
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

  ZERO_EXT_HOST_DEVICE void finish(const SignPlace& at, int first, float scale,
                                   const CompressTerms& corrected, float* shared) const {
    CompressTerms left;
    LaneWords bits;
    each_lane([&](int here, int) {
      bits.at[here] = 0;
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kHeld; ++k) {
        const float value = corrected.at[here][k];
        left.at[here][k] = ScalarSignRule::left_behind(value, scale);
        bits.at[here] |= ScalarSignRule::bits(value) << k;
      }
    });
    float* const own_errors = errors + at.offset;
    if (is_whole(at, first)) {
      Tile::store(own_errors + first, left);
    } else {
      Tile::store_shared(shared, left);
      meet_in_warp();
      each_by_lanes(first, at.length < first + kSignTile ? at.length : first + kSignTile,
                    [&](int, std::int64_t i) { own_errors[i] = shared[i - first]; });
    }
    write(at, first, scale, words_of_nibbles(bits));
  }

  // The words of a tile, without the bits past the last element, and the block's scale.
  ZERO_EXT_HOST_DEVICE void write(const SignPlace& at, int first, float scale,
                                  LaneWords words) const {
    auto* const message =
        reinterpret_cast<std::uint32_t*>(messages + at.part * core::sign_message_bytes(share));
    std::uint32_t* const target = message + (at.block * core::kSignBlock + first) / 32;
    const std::int64_t count = at.length - first;
    if (count >= kSignTile && is_aligned(target)) {
      store_lane_words(target, words);
    } else {
      each_lane([&](int here, int lane) {
        const std::int64_t own = count - 32 * lane;
        if (own <= 0) return;
        const std::uint32_t there = own < 32 ? (1U << own) - 1 : 0xFFFFFFFFU;
        target[lane] = words.at[here] & there;
      });
    }
    each_lane([&](int, int lane) {
      if (first + lane != 0) return;
      message[core::sign_words(share) + at.block] = std::bit_cast<std::uint32_t>(scale);
    });
  }

  // From four bits of each row in each lane to word L in lane L. Of eight neighbouring lanes, each
  // has four bits of each of eight words: they are transposed bit by bit of the lanes' numbers.
  static ZERO_EXT_HOST_DEVICE LaneWords words_of_nibbles(LaneWords bits) {
    static_assert(Tile::kGroup == 4 && Tile::kRows == 8);
    constexpr std::uint32_t kLower[] = {0x0F0F0F0FU, 0x00FF00FFU, 0x0000FFFFU};
    ZERO_EXT_UNROLL
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t lower = kLower[i];
      const int distance = 1 << i;
      const int shift = 4 * distance;
      LaneWords given;
      each_lane([&](int here, int lane) {
        given.at[here] = ((lane & distance) != 0 ? bits.at[here] : bits.at[here] >> shift) & lower;
      });
      const LaneWords taken = words_across(given, distance);
      each_lane([&](int here, int lane) {
        std::uint32_t& own = bits.at[here];
        own = (lane & distance) != 0 ? (own & ~lower) | taken.at[here]
                                     : (own & lower) | taken.at[here] << shift;
      });
    }
    // Lane 8 c + i now has word 4 i + c.
    return words_from(bits, [](int lane) { return lane % 4 * 8 + lane / 4; });
  }
};

// result = factor * sum [+ result].
template <class T>
ZERO_EXT_HOST_DEVICE void finish_signs(float sum, float factor, bool accumulate, T& result) {
  const float value = sum * factor;
  result = core::from_float<T>(accumulate ? value + core::to_float(result) : value);
}

// The same for a tile whose elements begin at a multiple of kAccessBytes.
template <class Tile, class T>
ZERO_EXT_HOST_DEVICE void finish_tile(const typename Tile::template Held<float>& terms,
                                      float factor, bool accumulate, T* target) {
  typename Tile::template Held<T> result;
  if (accumulate) Tile::load(target, result);
  each_lane([&](int here, int) {
    ZERO_EXT_UNROLL
    for (int k = 0; k < Tile::kHeld; ++k) {
      finish_signs(terms.at[here][k], factor, accumulate, result.at[here][k]);
    }
  });
  Tile::store(target, result);
}

// out = factor * a part's message [+ out], part after part. A warp takes four tiles at a time.
template <class T>
struct ExpandSigns {
  using Tile = SignTile<T>;
  static constexpr std::int64_t kRun = SignWords::kRows * kSignTile;

  const std::uint8_t* messages;
  std::int64_t share;
  std::int64_t parts;
  float factor;
  bool accumulate;
  T* out;

  ZERO_EXT_HOST_DEVICE std::int64_t runs_of_part() const { return core::ceil_div(share, kRun); }
  std::int64_t work() const { return parts * runs_of_part(); }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    over_places(warp, warps, parts, runs_of_part(), [&](std::int64_t part, std::int64_t run) {
      const SignMessages own{messages + part * core::sign_message_bytes(share), share, 1};
      const std::int64_t begin = run * kRun;
      T* const target = out + part * share;
      if (begin + kRun <= share && is_aligned(target)) return expand(own, begin, target + begin);
      const std::int64_t end = begin + kRun < share ? begin + kRun : share;
      each_by_lanes(begin, end, [&](int, std::int64_t i) {
        finish_signs(own.element(i), factor, accumulate, target[i]);
      });
    });
  }

  // All elements of a run, which are of one block.
  ZERO_EXT_HOST_DEVICE void expand(const SignMessages& message, std::int64_t begin,
                                   T* target) const {
    const std::uint32_t* const source = message.words(0, begin);
    SignWords::Held<std::uint32_t> words;
    if (is_aligned(source)) {
      SignWords::load(source, words);
    } else {
      SignWords::load_some(source, 0, SignWords::kElements, 0U, words);
    }
    LaneWords scales;
    each_lane([&](int here, int) { scales.at[here] = *message.scale(0, begin); });
    ZERO_EXT_UNROLL_BY(1)
    for (int k = 0; k < SignWords::kRows; ++k, target += kSignTile) {
      typename Tile::template Held<float> terms;
      terms.fill(0.0F);
      add_signs<Tile>(SignMessages::row_of(words, 0), scales, terms);
      turn(words);
      finish_tile<Tile>(terms, factor, accumulate, target);
    }
  }

  // The next tile's words come to the front.
  static ZERO_EXT_HOST_DEVICE void turn(SignWords::Held<std::uint32_t>& words) {
    each_lane([&](int here, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k + 1 < SignWords::kRows; ++k) words.at[here][k] = words.at[here][k + 1];
    });
  }
};

// out = factor * sum of all messages [+ out].
struct SumSigns {
  using Tile = SignTile<float>;

  SignMessages messages;
  float factor;
  bool accumulate;
  float* out;

  std::int64_t work() const { return core::ceil_div(messages.share, kSignTile); }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t begin = warp * kSignTile; begin < messages.share;
         begin += warps * kSignTile) {
      if (begin + kSignTile <= messages.share && is_aligned(out)) {
        Tile::Held<float> terms;
        messages.sum<Tile>(begin, terms);
        finish_tile<Tile>(terms, factor, accumulate, out + begin);
        continue;
      }
      const std::int64_t end =
          begin + kSignTile < messages.share ? begin + kSignTile : messages.share;
      each_by_lanes(begin, end, [&](int, std::int64_t i) {
        finish_signs(messages.element(i), factor, accumulate, out[i]);
      });
    }
  }
};

}  // namespace zero_ext::cuda
