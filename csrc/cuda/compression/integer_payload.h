// Messages of integers as a warp reads and writes them: see integer_blocks_kernel.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../core/compression/payload_layout.h"
#include "../common/warp_tile.h"

namespace zero_ext::cuda {

inline constexpr int kHeldBlock = 256;
inline constexpr int kBlocksOfRun = 4;
inline constexpr int kBlockLanes = kWarpLanes / kBlocksOfRun;
inline constexpr int kHeldRun = kHeldBlock * kBlocksOfRun;

using IntegerTile = WarpTile<4, 8, kBlockLanes>;  // of a run's elements
using IntegerLanes = IntegerTile::Held<float>;
static_assert(IntegerTile::kElements == kHeldRun);

// Of a run's words. Row r of a block's words has row r of its elements in the lowest fields, row
// r + kRows in the next and so on.
template <int Bits>
using IntegerWords = WarpTile<4, Bits / 4, kBlockLanes>;

// A lane's block: its scale and, of an asymmetric code, its lowest element, as bits.
struct LaneScales {
  LaneWords scale;
  LaneWords lowest;
};

// A block among those of all parts.
struct IntegerPlace {
  std::int64_t part;
  std::int64_t block;  // of the part
  std::int64_t begin;  // its first element, in the part
  int length;          // elements

  static ZERO_EXT_HOST_DEVICE IntegerPlace at(std::int64_t part, std::int64_t block,
                                              std::int64_t share, std::int64_t size) {
    const std::int64_t begin = block * size;
    return {part, block, begin, static_cast<int>(share - begin < size ? share - begin : size)};
  }
};

// Messages of one format and `share` elements each, one behind the other. The sizes are the host's:
// their divisions take a device long.
template <class Byte>
struct IntegerMessages {
  Byte* bytes;
  core::BlockFormat format;
  std::int64_t share;
  std::int64_t block_count;    // of a message
  std::int64_t message_bytes;  // of a message

  IntegerMessages(Byte* first, const core::BlockFormat& of, std::int64_t elements)
      : bytes(first),
        format(of),
        share(elements),
        block_count(of.blocks(elements)),
        message_bytes(of.message_bytes(elements)) {}

  // Runs of a message, and the blocks behind them.
  ZERO_EXT_HOST_DEVICE std::int64_t runs() const {
    return format.block == kHeldBlock ? share / kHeldRun : 0;
  }
  ZERO_EXT_HOST_DEVICE std::int64_t rest() const { return block_count - runs() * kBlocksOfRun; }
  ZERO_EXT_HOST_DEVICE IntegerPlace place(std::int64_t part, std::int64_t block) const {
    return IntegerPlace::at(part, block, share, format.block);
  }

  ZERO_EXT_HOST_DEVICE auto* words(std::int64_t message) const {
    using Word = std::conditional_t<std::is_const_v<Byte>, const std::uint32_t, std::uint32_t>;
    return reinterpret_cast<Word*>(bytes + message * message_bytes);
  }
  // As bits.
  ZERO_EXT_HOST_DEVICE auto* scales(std::int64_t message) const {
    return words(message) + format.words(share);
  }
  // Whether words and scales of a message begin at multiples of kAccessBytes.
  ZERO_EXT_HOST_DEVICE bool aligned(std::int64_t message) const {
    return is_aligned(words(message)) && is_aligned(scales(message));
  }
};

// Of four words a lane's `number`.
ZERO_EXT_HOST_DEVICE std::uint32_t pick(const AccessWords& words, int number) {
  const bool upper = (number & 2) != 0;
  return choose((number & 1) != 0, choose(upper, words.at[3], words.at[1]),
                choose(upper, words.at[2], words.at[0]));
}

// The scales of a run of blocks, one lane's or all in whole accesses, for which the address is a
// multiple of kAccessBytes.
template <bool kIsSymmetric>
ZERO_EXT_HOST_DEVICE LaneScales load_scales(const std::uint32_t* source, bool wide) {
  LaneScales result;
  each_lane([&](int here, int lane) {
    const int block = lane / kBlockLanes;
    if (wide) {
      const AccessWords words = load_words(source + (kIsSymmetric ? 0 : block / 2 * 4));
      result.scale.at[here] = pick(words, kIsSymmetric ? block : block % 2 * 2);
      result.lowest.at[here] = kIsSymmetric ? 0U : pick(words, block % 2 * 2 + 1);
    } else {
      result.scale.at[here] = source[block * (kIsSymmetric ? 1 : 2)];
      result.lowest.at[here] = kIsSymmetric ? 0U : source[block * 2 + 1];
    }
  });
  return result;
}

template <bool kIsSymmetric>
ZERO_EXT_HOST_DEVICE void store_scales(std::uint32_t* target, const LaneScales& scales, bool wide) {
  constexpr int kEach = kIsSymmetric ? 1 : 2;
  if (!wide) {
    each_lane([&](int here, int lane) {
      if (lane % kBlockLanes != 0) return;
      std::uint32_t* const own = target + lane / kBlockLanes * kEach;
      own[0] = scales.scale.at[here];
      if constexpr (!kIsSymmetric) own[1] = scales.lowest.at[here];
    });
    return;
  }
  AccessWords gathered[kLanesHere];
  ZERO_EXT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const LaneWords& from = k % kEach == 0 ? scales.scale : scales.lowest;
    const LaneWords given = words_from(from, [&](int lane) {
      return (lane * (4 / kEach) + k / kEach) * kBlockLanes % kWarpLanes;
    });
    each_lane([&](int here, int) { gathered[here].at[k] = given.at[here]; });
  }
  each_lane([&](int here, int lane) {
    if (lane < kEach) store_words_globally(target + 4 * lane, gathered[here]);
  });
}

}  // namespace zero_ext::cuda
