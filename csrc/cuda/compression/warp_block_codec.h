// Blocks of 256 elements as the lanes of a warp hold them, to and from an 8-bit dynamic code.
//
// A warp takes kRunBlocks neighboring blocks, a run, whose scales are 16 bytes, two blocks at a
// time, of whose codes a lane moves 16 bytes.
#pragma once

#include <cstdint>

#include "../../core/compression/block_scale_formula.h"
#include "../../core/compression/blockwise.h"
#include "../../core/compression/dynamic_code_formula.h"
#include "../../core/simd/vector_scalar.h"
#include "../common/warp_tile.h"

namespace zero_ext::cuda {

using BlockTile = WarpTile<4, 2>;  // of a block's elements
using CodeTile =
    WarpTile<1, 4>;  // of two blocks' codes, four in a word as a group is four elements
using BlockLanes = BlockTile::Fragment<float>;
using CodeLanes = CodeTile::Fragment<std::uint32_t>;
static_assert(BlockTile::kElements == core::kQuantizationBlock && CodeTile::kPerLane == 4);

inline constexpr int kRunBlocks = 4;
inline constexpr std::int64_t kRunElements = kRunBlocks * core::kQuantizationBlock;

struct alignas(kAccessBytes) RunScales {
  float at[kRunBlocks];
};

// The next block's scale comes to the front; after kRunBlocks turns all are where they were.
ZERO_EXT_HOST_DEVICE void rotate(RunScales& scales) {
  const float first = scales.at[0];
  ZERO_EXT_UNROLL
  for (int k = 0; k + 1 < kRunBlocks; ++k) scales.at[k] = scales.at[k + 1];
  scales.at[kRunBlocks - 1] = first;
}

// The codes of two blocks from an address that is a multiple of kAccessBytes.
ZERO_EXT_HOST_DEVICE void load_codes(const std::uint8_t* source, CodeLanes& codes) {
  CodeTile::load(reinterpret_cast<const std::uint32_t*>(source), codes);
}
ZERO_EXT_HOST_DEVICE void store_codes(std::uint8_t* target, const CodeLanes& codes) {
  CodeTile::store(reinterpret_cast<std::uint32_t*>(target), codes);
}

// Calls run(number) for the runs of this warp that are whole, and block(number) for the blocks of
// the others.
template <class Run, class Block>
ZERO_EXT_HOST_DEVICE void for_each_run(std::int64_t warp, std::int64_t warps, std::int64_t elements,
                                       bool aligned, const Run& run, const Block& block) {
  const std::int64_t full = aligned ? elements / kRunElements : 0;
  for (std::int64_t i = warp; i < full; i += warps) run(i);
  const std::int64_t blocks = core::block_count(elements);
  for (std::int64_t i = full * kRunBlocks + warp; i < blocks; i += warps) block(i);
}

// The number of warps that find something to do.
ZERO_EXT_HOST_DEVICE std::int64_t run_count(std::int64_t elements) {
  return (elements + kRunElements - 1) / kRunElements;
}

// The value of a block's largest magnitude, in every lane; see scale_of_key.
ZERO_EXT_HOST_DEVICE float scale_of(const BlockLanes& block) {
  std::uint32_t highest = 0;
  each_lane([&](int local, int) {
    ZERO_EXT_UNROLL
    for (const float& value : block.at[local]) {
      const std::uint32_t key = core::ScalarVector::magnitude_keys(&value);
      highest = key > highest ? key : highest;
    }
  });
  return core::scale_of_key(max_of_warp(highest));
}

// `which` is 0 or 1: a block of the two whose codes lanes hold.
template <class Code>
struct WarpBlockCodec {
  using Scalar = core::ScalarVector;

  static ZERO_EXT_HOST_DEVICE void decode(const CodeLanes& codes, int which, float scale,
                                          BlockLanes& block) {
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < BlockTile::kPerLane; ++k) {
        const std::uint32_t word = codes.at[local][which * BlockTile::kRows + k / 4];
        const auto code = static_cast<float>(word >> (8 * (k % 4)) & 0xFFU);
        block.at[local][k] = Scalar::mul(core::decode_dynamic<Scalar, Code>(code), scale);
      }
    });
  }

  // Returns the scale, in every lane.
  static ZERO_EXT_HOST_DEVICE float encode(const BlockLanes& block, int which, CodeLanes& codes) {
    const float scale = scale_of(block);
    const bool divides = core::scale_divides(scale);
    const float inverse = divides ? 1 / scale : 0.0F;
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < BlockTile::kPerLane; ++k) {
        const float value = Scalar::mul(block.at[local][k], inverse);
        const float code = core::encode_dynamic<Scalar, Code>(divides ? value : 0.0F);
        const std::uint32_t byte = divides ? static_cast<std::uint32_t>(code) : Code::zero;
        std::uint32_t& word = codes.at[local][which * BlockTile::kRows + k / 4];
        word = k % 4 == 0 ? byte : word | byte << (8 * (k % 4));
      }
    });
    return divides ? scale : core::stored_scale(scale);
  }

  // One block alone, of `count` elements; the others become zeros, and their codes are not stored.
  static ZERO_EXT_HOST_DEVICE void load_block(const std::uint8_t* codes, std::int64_t count,
                                              float scale, BlockLanes& block) {
    BlockTile::Fragment<std::uint8_t> own;
    BlockTile::load_partial(codes, 0, count, Code::zero, own);
    CodeLanes pair;
    pair.fill(0);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < BlockTile::kPerLane; ++k) {
        pair.at[local][k / 4] |= std::uint32_t{own.at[local][k]} << (8 * (k % 4));
      }
    });
    decode(pair, 0, scale, block);
  }
  static ZERO_EXT_HOST_DEVICE float store_block(const BlockLanes& block, std::int64_t count,
                                                std::uint8_t* codes) {
    CodeLanes pair;
    const float scale = encode(block, 0, pair);
    BlockTile::Fragment<std::uint8_t> own;
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < BlockTile::kPerLane; ++k) {
        own.at[local][k] = static_cast<std::uint8_t>(pair.at[local][k / 4] >> (8 * (k % 4)));
      }
    });
    BlockTile::store_partial(codes, 0, count, own);
    return scale;
  }
};

}  // namespace zero_ext::cuda
