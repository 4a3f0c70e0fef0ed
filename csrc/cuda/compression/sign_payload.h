// Payloads of signs as a warp reads them: see sign_kernel.h.
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

// A block of elements among those of all chunks.
struct SignBlockPosition {
  std::int64_t chunk;
  std::int64_t block;   // of the chunk
  std::int64_t length;  // elements
  std::int64_t offset;  // of its first element from that of the first chunk

  // The block of that number when the blocks of all chunks, `chunk_numel` elements each, are
  // counted through.
  static ZERO_EXT_HOST_DEVICE SignBlockPosition of(std::int64_t number, std::int64_t chunk_numel) {
    const std::int64_t blocks = core::sign_blocks(chunk_numel);
    SignBlockPosition at{number / blocks, number % blocks, chunk_numel, 0};
    const std::int64_t begin = at.block * core::kSignBlock;
    at.length = chunk_numel - begin < core::kSignBlock ? chunk_numel - begin : core::kSignBlock;
    at.offset = at.chunk * chunk_numel + begin;
    return at;
  }
};

// Adds what a tile's bits stand for, of which lane L has word L, to its terms.
template <class Tile>
ZERO_EXT_HOST_DEVICE void add_sign_bits(const LaneWords& words, const LaneWords& scales,
                                        typename Tile::template Fragment<float>& terms) {
  constexpr int kGroup = Tile::kGroup;
  static_assert(Tile::kElements == kSignTile);
  ZERO_EXT_UNROLL
  for (int row = 0; row < Tile::kRows; ++row) {
    const LaneWords bits =
        shuffle(words, [&](int lane) { return row * kGroup + lane * kGroup / kWarpLanes; });
    each_lane([&](int local, int lane) {
      const std::uint32_t own = bits.at[local] >> (lane * kGroup % kWarpLanes);
      const float scale = std::bit_cast<float>(scales.at[local]);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kGroup; ++k) {
        float& term = terms.at[local][row * kGroup + k];
        term = core::ScalarVector::add_signed(term, own >> k & 1U, scale);
      }
    });
  }
}

// Payloads of `chunk_numel` elements each, one behind the other.
struct SignPayloads {
  const std::uint8_t* bytes;
  std::int64_t chunk_numel;
  std::int64_t count;

  // Where the word of element `first` is, and its scale.
  ZERO_EXT_HOST_DEVICE const std::uint32_t* words(std::int64_t payload, std::int64_t first) const {
    return reinterpret_cast<const std::uint32_t*>(bytes +
                                                  payload * core::sign_payload_bytes(chunk_numel)) +
           first / 32;
  }
  ZERO_EXT_HOST_DEVICE const std::uint32_t* scale(std::int64_t payload, std::int64_t first) const {
    return words(payload, 0) + core::sign_words(chunk_numel) + first / core::kSignBlock;
  }

  // Adds up, in their order, what all payloads stand for in a tile from element `first` on. Lanes
  // have the scales of as many payloads.
  template <class Tile>
  ZERO_EXT_HOST_DEVICE void sum(std::int64_t first,
                                typename Tile::template Fragment<float>& terms) const {
    const std::int64_t step = core::sign_payload_bytes(chunk_numel) / 4;
    const bool wide = is_aligned(words(0, first)) && step % 4 == 0;
    terms.fill(0.0F);
    for (std::int64_t begin = 0; begin < count; begin += kWarpLanes) {
      const auto last = static_cast<int>(count - begin < kWarpLanes ? count - begin : kWarpLanes);
      LaneWords scales;
      each_lane([&](int local, int lane) {
        scales.at[local] = lane < last ? *scale(begin + lane, first) : 0U;
      });
      const auto add = [&](const LaneWords& bits, int payload) {
        add_sign_bits<Tile>(bits, shuffle(scales, [&](int) { return payload; }), terms);
      };
      const std::uint32_t* source = words(begin, first);
      int payload = 0;
      if (wide) {
        ZERO_EXT_UNROLL_BY(1)
        for (; payload + SignWords::kRows <= last; payload += SignWords::kRows) {
          SignWords::Fragment<std::uint32_t> bits;
          SignWords::load(source, bits, step);
          source += SignWords::kRows * step;
          ZERO_EXT_UNROLL
          for (int k = 0; k < SignWords::kRows; ++k) add(row_of(bits, k), payload + k);
        }
      }
      ZERO_EXT_UNROLL_BY(1)
      for (; payload < last; ++payload, source += step) {
        LaneWords bits;
        each_lane([&](int local, int lane) { bits.at[local] = source[lane]; });
        add(bits, payload);
      }
    }
  }

  static ZERO_EXT_HOST_DEVICE LaneWords row_of(const SignWords::Fragment<std::uint32_t>& bits,
                                               int row) {
    LaneWords result;
    each_lane([&](int local, int) { result.at[local] = bits.at[local][row]; });
    return result;
  }

  // The same for one element.
  ZERO_EXT_HOST_DEVICE float element(std::int64_t i) const {
    float sum = 0.0F;
    ZERO_EXT_UNROLL_BY(1)
    for (std::int64_t payload = 0; payload < count; ++payload) {
      sum = core::ScalarVector::add_signed(sum, *words(payload, i) >> (i % 32) & 1U,
                                           std::bit_cast<float>(*scale(payload, i)));
    }
    return sum;
  }
};

}  // namespace zero_ext::cuda
