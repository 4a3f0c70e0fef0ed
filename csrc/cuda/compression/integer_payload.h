// Payloads of integers as a warp reads and writes them: see integer_blocks_kernel.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../core/compression/payload_layout.h"
#include "../common/warp_tile.h"

namespace zero_ext::cuda {

inline constexpr int kRegisterBlock = 256;
inline constexpr int kBlocksOfRun = 4;
inline constexpr int kBlockLanes = kWarpLanes / kBlocksOfRun;
inline constexpr int kRegisterRun = kRegisterBlock * kBlocksOfRun;

using IntegerTile = WarpTile<4, 8, kBlockLanes>;  // of a run's elements
using IntegerLanes = IntegerTile::Fragment<float>;
static_assert(IntegerTile::kElements == kRegisterRun);

// Of a run's words. Row r of a block's words has row r of its elements in the lowest fields, row
// r + kRows in the next and so on.
template <int Bits>
using IntegerWords = WarpTile<4, Bits / 4, kBlockLanes>;

// A lane's block: its scale and, of an asymmetric code, its lowest element, as bits.
struct LaneScales {
  LaneWords scale;
  LaneWords lowest;
};

// A block among those of all chunks.
struct IntegerBlockPosition {
  std::int64_t chunk;
  std::int64_t block;  // of the chunk
  std::int64_t begin;  // its first element, in the chunk
  int length;          // elements

  static ZERO_EXT_HOST_DEVICE IntegerBlockPosition at(std::int64_t chunk, std::int64_t block,
                                                      std::int64_t chunk_numel, std::int64_t size) {
    const std::int64_t begin = block * size;
    return {chunk, block, begin,
            static_cast<int>(chunk_numel - begin < size ? chunk_numel - begin : size)};
  }
};

// Payloads of one format and `chunk_numel` elements each, one behind the other. The sizes are the
// host's: their divisions take a device long.
template <class Byte>
struct IntegerPayloads {
  Byte* bytes;
  core::BlockFormat format;
  std::int64_t chunk_numel;
  std::int64_t block_count;    // of a payload
  std::int64_t payload_bytes;  // of a payload

  IntegerPayloads(Byte* first, const core::BlockFormat& of, std::int64_t elements)
      : bytes(first),
        format(of),
        chunk_numel(elements),
        block_count(of.blocks(elements)),
        payload_bytes(of.payload_bytes(elements)) {}

  // Runs of a payload, and the blocks behind them.
  ZERO_EXT_HOST_DEVICE std::int64_t runs() const {
    return format.block == kRegisterBlock ? chunk_numel / kRegisterRun : 0;
  }
  ZERO_EXT_HOST_DEVICE std::int64_t rest() const { return block_count - runs() * kBlocksOfRun; }
  ZERO_EXT_HOST_DEVICE IntegerBlockPosition position(std::int64_t chunk, std::int64_t block) const {
    return IntegerBlockPosition::at(chunk, block, chunk_numel, format.block);
  }

  ZERO_EXT_HOST_DEVICE auto* words(std::int64_t payload) const {
    using Word = std::conditional_t<std::is_const_v<Byte>, const std::uint32_t, std::uint32_t>;
    return reinterpret_cast<Word*>(bytes + payload * payload_bytes);
  }
  // As bits.
  ZERO_EXT_HOST_DEVICE auto* scales(std::int64_t payload) const {
    return words(payload) + format.words(chunk_numel);
  }
  // Whether words and scales of a payload begin at multiples of kAccessBytes.
  ZERO_EXT_HOST_DEVICE bool aligned(std::int64_t payload) const {
    return is_aligned(words(payload)) && is_aligned(scales(payload));
  }
};

// Of four words a lane's `number`.
ZERO_EXT_HOST_DEVICE std::uint32_t pick(const AccessWords& words, int number) {
  const bool upper = (number & 2) != 0;
  return select((number & 1) != 0, select(upper, words.at[3], words.at[1]),
                select(upper, words.at[2], words.at[0]));
}

// The scales of a run of blocks, one lane's or all in whole accesses, for which the address is a
// multiple of kAccessBytes.
template <bool kIsSymmetric>
ZERO_EXT_HOST_DEVICE LaneScales load_scales(const std::uint32_t* source, bool wide) {
  LaneScales result;
  each_lane([&](int local, int lane) {
    const int block = lane / kBlockLanes;
    if (wide) {
      const AccessWords words = load_words(source + (kIsSymmetric ? 0 : block / 2 * 4));
      result.scale.at[local] = pick(words, kIsSymmetric ? block : block % 2 * 2);
      result.lowest.at[local] = kIsSymmetric ? 0U : pick(words, block % 2 * 2 + 1);
    } else {
      result.scale.at[local] = source[block * (kIsSymmetric ? 1 : 2)];
      result.lowest.at[local] = kIsSymmetric ? 0U : source[block * 2 + 1];
    }
  });
  return result;
}

template <bool kIsSymmetric>
ZERO_EXT_HOST_DEVICE void store_scales(std::uint32_t* target, const LaneScales& scales, bool wide) {
  constexpr int kEach = kIsSymmetric ? 1 : 2;
  if (!wide) {
    each_lane([&](int local, int lane) {
      if (lane % kBlockLanes != 0) return;
      std::uint32_t* const own = target + lane / kBlockLanes * kEach;
      own[0] = scales.scale.at[local];
      if constexpr (!kIsSymmetric) own[1] = scales.lowest.at[local];
    });
    return;
  }
  AccessWords gathered[kThreadLanes];
  ZERO_EXT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const LaneWords& from = k % kEach == 0 ? scales.scale : scales.lowest;
    const LaneWords received = shuffle(from, [&](int lane) {
      return (lane * (4 / kEach) + k / kEach) * kBlockLanes % kWarpLanes;
    });
    each_lane([&](int local, int) { gathered[local].at[k] = received.at[local]; });
  }
  each_lane([&](int local, int lane) {
    if (lane < kEach) store_words_global(target + 4 * lane, gathered[local]);
  });
}

}  // namespace zero_ext::cuda
