// Compression to signs, and back: see ../../core/compression/sign_formula.h for the arithmetic.
//
// A warp takes tiles of kSignTile elements, whose bits are a word of each lane: elements move in
// accesses of 16 bytes, and so do the words of four payloads, or of four tiles of one. Lanes then
// fetch the bits of the elements that they hold from each other. Words of payloads that do not
// begin at multiples of 16 bytes move one by one.
//
// A block of threads compresses a block of elements, which it keeps in registers between the sum of
// their magnitudes and what is left behind: values and errors are read once.
#pragma once

#include <bit>
#include <cstdint>

#include "../../core/compression/sign_formula.h"
#include "../../core/simd/vector_scalar.h"
#include "../common/nested_grid.h"
#include "sign_payload.h"

namespace zero_ext::cuda {

using ScalarSignRule = core::SignRule<core::ScalarVector>;

// What is compressed: values, or the sum of payloads. load() gives a tile of a block, all of which
// is there, element() one element of a block.
using CompressTile = WarpTile<4, 8>;
using CompressTerms = CompressTile::Fragment<float>;

template <class T>
struct SignValues {
  static constexpr int kMinBlocks = 3;
  const T* values;

  ZERO_EXT_HOST_DEVICE bool aligned(const SignBlockPosition& at) const {
    return is_aligned(values + at.offset);
  }
  ZERO_EXT_HOST_DEVICE void load(const SignBlockPosition& at, int first,
                                 CompressTerms& terms) const {
    CompressTile::Fragment<T> own;
    CompressTile::load(values + at.offset + first, own);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < CompressTile::kPerLane; ++k) {
        terms.at[local][k] = core::to_float(own.at[local][k]);
      }
    });
  }
  ZERO_EXT_HOST_DEVICE float element(const SignBlockPosition& at, std::int64_t i) const {
    return core::to_float(values[at.offset + i]);
  }
};

struct SignSum {
  static constexpr int kMinBlocks = 2;  // without spilled registers
  SignPayloads payloads;

  ZERO_EXT_HOST_DEVICE bool aligned(const SignBlockPosition&) const { return true; }
  ZERO_EXT_HOST_DEVICE void load(const SignBlockPosition& at, int first,
                                 CompressTerms& terms) const {
    payloads.sum<CompressTile>(at.block * core::kSignBlock + first, terms);
  }
  ZERO_EXT_HOST_DEVICE float element(const SignBlockPosition& at, std::int64_t i) const {
    return payloads.element(at.block * core::kSignBlock + i);
  }
};

// Compresses factor * terms + errors; the errors become what that left behind.
template <class Terms>
struct Compress1bit {
  static constexpr int kMinBlocks = Terms::kMinBlocks;
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
  std::uint8_t* payloads;
  std::int64_t chunk_numel;  // elements of a chunk
  std::int64_t chunks;

  std::int64_t blocks() const { return chunks * core::sign_blocks(chunk_numel); }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void operator()(const ThreadBlock& thread_block) const {
    Memory& memory = *reinterpret_cast<Memory*>(thread_block.shared_memory());
    const SignBlockPosition at = SignBlockPosition::of(thread_block.block(), chunk_numel);
    const int first = thread_block.warp() * kSignTile;
    CompressTerms corrected;
    correct(at, first, corrected, memory.magnitudes + first);
    thread_block.sync();
    each_lane([&](int, int lane) {
      const int own = thread_block.warp() * kWarpLanes + lane;
      memory.lanes[own] = lane_sum(memory.magnitudes + own);
    });
    thread_block.sync();
    Registers<float, 1> sum;
    each_lane([&](int local, int lane) { sum.at[local][0] = fold(memory.lanes + lane); });
    sum_of_lanes(sum);
    const float scale = core::sign_scale(sum.at[0][0], at.length);
    finish(at, first, scale, corrected, memory.magnitudes + first);
  }

  // Whether all elements of a tile are there and may be moved at once. Others go one by one, by way
  // of the warp's region of the shared memory.
  ZERO_EXT_HOST_DEVICE bool is_full_tile(const SignBlockPosition& at, int first) const {
    return first + kSignTile <= at.length && terms.aligned(at) && is_aligned(errors + at.offset);
  }

  ZERO_EXT_HOST_DEVICE void correct(const SignBlockPosition& at, int first,
                                    CompressTerms& corrected, float* magnitudes) const {
    const float* const own_errors = errors + at.offset;
    if (is_full_tile(at, first)) {
      CompressTerms error;
      terms.load(at, first, corrected);
      Tile::load(own_errors + first, error);
      each_lane([&](int local, int) {
        ZERO_EXT_UNROLL
        for (int k = 0; k < Tile::kPerLane; ++k) {
          float& value = corrected.at[local][k];
          value = ScalarSignRule::corrected(value, factor, error.at[local][k]);
        }
      });
    } else {
      for_each_strided(0, kSignTile, [&](int, std::int64_t position) {
        const std::int64_t i = first + position;
        magnitudes[position] =
            i < at.length ? ScalarSignRule::corrected(terms.element(at, i), factor, own_errors[i])
                          : 0.0F;
      });
      sync_warp();
      Tile::load(magnitudes, corrected);
    }
    CompressTerms sizes;
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kPerLane; ++k) {
        sizes.at[local][k] = core::ScalarVector::abs(corrected.at[local][k]);
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

  ZERO_EXT_HOST_DEVICE void finish(const SignBlockPosition& at, int first, float scale,
                                   const CompressTerms& corrected, float* shared) const {
    CompressTerms left;
    LaneWords bits;
    each_lane([&](int local, int) {
      bits.at[local] = 0;
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kPerLane; ++k) {
        const float value = corrected.at[local][k];
        left.at[local][k] = ScalarSignRule::residual(value, scale);
        bits.at[local] |= ScalarSignRule::bits(value) << k;
      }
    });
    float* const own_errors = errors + at.offset;
    if (is_full_tile(at, first)) {
      Tile::store(own_errors + first, left);
    } else {
      Tile::store_shared(shared, left);
      sync_warp();
      for_each_strided(first, at.length < first + kSignTile ? at.length : first + kSignTile,
                       [&](int, std::int64_t i) { own_errors[i] = shared[i - first]; });
    }
    write(at, first, scale, words_of_nibbles(bits));
  }

  // The words of a tile, without the bits past the last element, and the block's scale.
  ZERO_EXT_HOST_DEVICE void write(const SignBlockPosition& at, int first, float scale,
                                  LaneWords words) const {
    auto* const payload = reinterpret_cast<std::uint32_t*>(
        payloads + at.chunk * core::sign_payload_bytes(chunk_numel));
    std::uint32_t* const target = payload + (at.block * core::kSignBlock + first) / 32;
    const std::int64_t count = at.length - first;
    if (count >= kSignTile && is_aligned(target)) {
      store_lane_words(target, words);
    } else {
      each_lane([&](int local, int lane) {
        const std::int64_t own = count - 32 * lane;
        if (own <= 0) return;
        const std::uint32_t there = own < 32 ? (1U << own) - 1 : 0xFFFFFFFFU;
        target[lane] = words.at[local] & there;
      });
    }
    each_lane([&](int, int lane) {
      if (first + lane != 0) return;
      payload[core::sign_words(chunk_numel) + at.block] = std::bit_cast<std::uint32_t>(scale);
    });
  }

  // From four bits of each row in each lane to word L in lane L. Of eight neighboring lanes, each
  // has four bits of each of eight words: they are transposed bit by bit of the lanes' numbers.
  static ZERO_EXT_HOST_DEVICE LaneWords words_of_nibbles(LaneWords bits) {
    static_assert(Tile::kGroup == 4 && Tile::kRows == 8);
    constexpr std::uint32_t kLower[] = {0x0F0F0F0FU, 0x00FF00FFU, 0x0000FFFFU};
    ZERO_EXT_UNROLL
    for (int i = 0; i < 3; ++i) {
      const std::uint32_t lower = kLower[i];
      const int distance = 1 << i;
      const int shift = 4 * distance;
      LaneWords sent;
      each_lane([&](int local, int lane) {
        sent.at[local] =
            ((lane & distance) != 0 ? bits.at[local] : bits.at[local] >> shift) & lower;
      });
      const LaneWords received = shuffle_xor(sent, distance);
      each_lane([&](int local, int lane) {
        std::uint32_t& own = bits.at[local];
        own = (lane & distance) != 0 ? (own & ~lower) | received.at[local]
                                     : (own & lower) | received.at[local] << shift;
      });
    }
    // Lane 8 c + i now has word 4 i + c.
    return shuffle(bits, [](int lane) { return lane % 4 * 8 + lane / 4; });
  }
};

// result = factor * sum [+ result].
template <class T>
ZERO_EXT_HOST_DEVICE void finish_1bit(float sum, float factor, bool accumulate, T& result) {
  const float value = sum * factor;
  result = core::from_float<T>(accumulate ? value + core::to_float(result) : value);
}

// The same for a tile whose elements begin at a multiple of kAccessBytes.
template <class Tile, class T>
ZERO_EXT_HOST_DEVICE void finish_tile(const typename Tile::template Fragment<float>& terms,
                                      float factor, bool accumulate, T* target) {
  typename Tile::template Fragment<T> result;
  if (accumulate) Tile::load(target, result);
  each_lane([&](int local, int) {
    ZERO_EXT_UNROLL
    for (int k = 0; k < Tile::kPerLane; ++k) {
      finish_1bit(terms.at[local][k], factor, accumulate, result.at[local][k]);
    }
  });
  Tile::store(target, result);
}

// out = factor * a chunk's payload [+ out], chunk after chunk. A warp takes four tiles at a time.
template <class T>
struct Decompress1bit {
  using Tile = SignTile<T>;
  static constexpr std::int64_t kRun = SignWords::kRows * kSignTile;

  const std::uint8_t* payloads;
  std::int64_t chunk_numel;
  std::int64_t chunks;
  float factor;
  bool accumulate;
  T* out;

  ZERO_EXT_HOST_DEVICE std::int64_t runs_of_chunk() const {
    return core::ceil_div(chunk_numel, kRun);
  }
  std::int64_t work() const { return chunks * runs_of_chunk(); }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    for_each_nested(
        warp, warps, chunks, runs_of_chunk(), [&](std::int64_t chunk, std::int64_t run) {
          const SignPayloads own{payloads + chunk * core::sign_payload_bytes(chunk_numel),
                                 chunk_numel, 1};
          const std::int64_t begin = run * kRun;
          T* const target = out + chunk * chunk_numel;
          if (begin + kRun <= chunk_numel && is_aligned(target))
            return expand(own, begin, target + begin);
          const std::int64_t end = begin + kRun < chunk_numel ? begin + kRun : chunk_numel;
          for_each_strided(begin, end, [&](int, std::int64_t i) {
            finish_1bit(own.element(i), factor, accumulate, target[i]);
          });
        });
  }

  // All elements of a run, which are of one block.
  ZERO_EXT_HOST_DEVICE void expand(const SignPayloads& payload, std::int64_t begin,
                                   T* target) const {
    const std::uint32_t* const source = payload.words(0, begin);
    SignWords::Fragment<std::uint32_t> words;
    if (is_aligned(source)) {
      SignWords::load(source, words);
    } else {
      SignWords::load_partial(source, 0, SignWords::kElements, 0U, words);
    }
    LaneWords scales;
    each_lane([&](int local, int) { scales.at[local] = *payload.scale(0, begin); });
    ZERO_EXT_UNROLL_BY(1)
    for (int k = 0; k < SignWords::kRows; ++k, target += kSignTile) {
      typename Tile::template Fragment<float> terms;
      terms.fill(0.0F);
      add_sign_bits<Tile>(SignPayloads::row_of(words, 0), scales, terms);
      rotate(words);
      finish_tile<Tile>(terms, factor, accumulate, target);
    }
  }

  // The next tile's words come to the front.
  static ZERO_EXT_HOST_DEVICE void rotate(SignWords::Fragment<std::uint32_t>& words) {
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k + 1 < SignWords::kRows; ++k) words.at[local][k] = words.at[local][k + 1];
    });
  }
};

// out = factor * sum of all payloads [+ out].
struct Sum1bit {
  using Tile = SignTile<float>;

  SignPayloads payloads;
  float factor;
  bool accumulate;
  float* out;

  std::int64_t work() const { return core::ceil_div(payloads.chunk_numel, kSignTile); }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t begin = warp * kSignTile; begin < payloads.chunk_numel;
         begin += warps * kSignTile) {
      if (begin + kSignTile <= payloads.chunk_numel && is_aligned(out)) {
        Tile::Fragment<float> terms;
        payloads.sum<Tile>(begin, terms);
        finish_tile<Tile>(terms, factor, accumulate, out + begin);
        continue;
      }
      const std::int64_t end =
          begin + kSignTile < payloads.chunk_numel ? begin + kSignTile : payloads.chunk_numel;
      for_each_strided(begin, end, [&](int, std::int64_t i) {
        finish_1bit(payloads.element(i), factor, accumulate, out[i]);
      });
    }
  }
};

}  // namespace zero_ext::cuda
