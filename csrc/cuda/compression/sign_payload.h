// Messages of signs as a warp reads them: see sign_kernel.h.
#pragma once

#include <bit>
#include <cstdint>

#include "../../core/compression/payload_layout.h"
#include "../../core/simd/vector_scalar.h"
#include "../common/warp_tile.h"

namespace zero_ext::cuda {

inline constexpr int kSignTile = 32 * kWarpLanes;
using SignWords = WarpTile<1, 4>;  // a word of each lane, of each of four tiles

// The elements of a tile as a kernel that moves Ts holds them.
template <class T>
using SignTile = WarpTile<static_cast<int>(kAccessBytes / sizeof(T)),
                          kSignTile / kWarpLanes / static_cast<int>(kAccessBytes / sizeof(T))>;

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

// Adds what a tile's bits stand for, of which lane L has word L, to its terms.
template <class Tile>
ZERO_EXT_HOST_DEVICE void add_signs(const LaneWords& words, const LaneWords& scales,
                                    typename Tile::template Held<float>& terms) {
  constexpr int kGroup = Tile::kGroup;
  static_assert(Tile::kElements == kSignTile);
  ZERO_EXT_UNROLL
  for (int row = 0; row < Tile::kRows; ++row) {
    const LaneWords bits =
        words_from(words, [&](int lane) { return row * kGroup + lane * kGroup / kWarpLanes; });
    each_lane([&](int here, int lane) {
      const std::uint32_t own = bits.at[here] >> (lane * kGroup % kWarpLanes);
      const float scale = std::bit_cast<float>(scales.at[here]);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kGroup; ++k) {
        float& term = terms.at[here][row * kGroup + k];
        term = core::ScalarVector::add_signed(term, own >> k & 1U, scale);
      }
    });
  }
}

// Messages of `share` elements each, one behind the other.
struct SignMessages {
  const std::uint8_t* bytes;
  std::int64_t share;
  std::int64_t count;

  // Where the word of element `first` is, and its scale.
  ZERO_EXT_HOST_DEVICE const std::uint32_t* words(std::int64_t message, std::int64_t first) const {
    return reinterpret_cast<const std::uint32_t*>(bytes +
                                                  message * core::sign_message_bytes(share)) +
           first / 32;
  }
  ZERO_EXT_HOST_DEVICE const std::uint32_t* scale(std::int64_t message, std::int64_t first) const {
    return words(message, 0) + core::sign_words(share) + first / core::kSignBlock;
  }

  // Adds up, in their order, what all messages stand for in a tile from element `first` on. Lanes
  // have the scales of as many messages.
  template <class Tile>
  ZERO_EXT_HOST_DEVICE void sum(std::int64_t first,
                                typename Tile::template Held<float>& terms) const {
    const std::int64_t step = core::sign_message_bytes(share) / 4;
    const bool wide = is_aligned(words(0, first)) && step % 4 == 0;
    terms.fill(0.0F);
    for (std::int64_t begin = 0; begin < count; begin += kWarpLanes) {
      const auto last = static_cast<int>(count - begin < kWarpLanes ? count - begin : kWarpLanes);
      LaneWords scales;
      each_lane([&](int here, int lane) {
        scales.at[here] = lane < last ? *scale(begin + lane, first) : 0U;
      });
      const auto add = [&](const LaneWords& bits, int message) {
        add_signs<Tile>(bits, words_from(scales, [&](int) { return message; }), terms);
      };
      const std::uint32_t* source = words(begin, first);
      int message = 0;
      if (wide) {
        ZERO_EXT_UNROLL_BY(1)
        for (; message + SignWords::kRows <= last; message += SignWords::kRows) {
          SignWords::Held<std::uint32_t> bits;
          SignWords::load(source, bits, step);
          source += SignWords::kRows * step;
          ZERO_EXT_UNROLL
          for (int k = 0; k < SignWords::kRows; ++k) add(row_of(bits, k), message + k);
        }
      }
      ZERO_EXT_UNROLL_BY(1)
      for (; message < last; ++message, source += step) {
        LaneWords bits;
        each_lane([&](int here, int lane) { bits.at[here] = source[lane]; });
        add(bits, message);
      }
    }
  }

  static ZERO_EXT_HOST_DEVICE LaneWords row_of(const SignWords::Held<std::uint32_t>& bits,
                                               int row) {
    LaneWords result;
    each_lane([&](int here, int) { result.at[here] = bits.at[here][row]; });
    return result;
  }

  // The same for one element.
  ZERO_EXT_HOST_DEVICE float element(std::int64_t i) const {
    float sum = 0.0F;
    ZERO_EXT_UNROLL_BY(1)
    for (std::int64_t message = 0; message < count; ++message) {
      sum = core::ScalarVector::add_signed(sum, *words(message, i) >> (i % 32) & 1U,
                                           std::bit_cast<float>(*scale(message, i)));
    }
    return sum;
  }
};

}  // namespace zero_ext::cuda
