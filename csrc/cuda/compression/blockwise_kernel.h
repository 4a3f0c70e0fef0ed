// Block-wise quantization as a warp of a grid runs it: kernels are called with a warp's number and
// the number of warps.
#pragma once

#include <cstdint>

#include "../machine/fault.h"
#include "block_codec.h"

namespace zero_ext::cuda {

template <class Code>
struct QuantizeBlocks {
  const float* values;
  std::int64_t count;
  std::uint8_t* codes;
  float* scales;
  bool aligned;  // values, codes and scales start at multiples of kAccessBytes

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    over_runs(
        warp, warps, count, aligned, [&](std::int64_t i) { run(i); },
        [&](std::int64_t i) { block(i); });
  }

  ZERO_EXT_HOST_DEVICE void run(std::int64_t number) const {
    RunScales found{};
    ZERO_EXT_UNROLL_BY(1)
    for (int pair = 0; pair < kRunBlocks; pair += 2) {
      const std::int64_t begin = number * kRunElements + pair * core::kQuantizationBlock;
      CodeLanes pair_codes;
      ZERO_EXT_UNROLL
      for (int which = 0; which < 2; ++which) {
        const std::int64_t first = begin + which * core::kQuantizationBlock;
        BlockLanes own;
        BlockTile::load(values + first, own);
        check(own, first);
        found.at[0] = LaneCodec<Code>::encode(own, which, pair_codes);
        turn(found);
      }
      store_codes(codes + begin, pair_codes);
    }
    if (lane_number(0) == 0) reinterpret_cast<RunScales*>(scales)[number] = found;
  }

  ZERO_EXT_HOST_DEVICE void block(std::int64_t number) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    BlockLanes own;
    BlockTile::load_some(values + begin, 0, count - begin, 0.0F, own);
    check(own, begin);
    const float scale = LaneCodec<Code>::store_block(own, count - begin, codes + begin);
    if (lane_number(0) == 0) scales[number] = scale;
  }

  ZERO_EXT_HOST_DEVICE void check(const BlockLanes& own, std::int64_t begin) const {
    if constexpr (!Code::is_signed) {
      each_lane([&](int here, int lane) {
        float lowest = 0.0F;
        int at = 0;
        ZERO_EXT_UNROLL
        for (int k = 0; k < BlockTile::kHeld; ++k) {
          at = own.at[here][k] < lowest ? k : at;
          lowest = own.at[here][k] < lowest ? own.at[here][k] : lowest;
        }
        if (lowest < 0) {
          fail("quantize_blockwise", "values", begin + BlockTile::place(lane, at), "element",
               lowest, "zero or more for the unsigned code: pass signed=True");
        }
      });
    }
  }
};

template <class Code>
struct DequantizeBlocks {
  const std::uint8_t* codes;
  const float* scales;
  std::int64_t count;
  float* values;
  bool aligned;  // codes, scales and values start at multiples of kAccessBytes

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    over_runs(
        warp, warps, count, aligned, [&](std::int64_t i) { run(i); },
        [&](std::int64_t i) { block(i); });
  }

  ZERO_EXT_HOST_DEVICE void run(std::int64_t number) const {
    RunScales by = reinterpret_cast<const RunScales*>(scales)[number];
    ZERO_EXT_UNROLL_BY(1)
    for (int pair = 0; pair < kRunBlocks; pair += 2) {
      const std::int64_t begin = number * kRunElements + pair * core::kQuantizationBlock;
      CodeLanes pair_codes;
      load_codes(codes + begin, pair_codes);
      ZERO_EXT_UNROLL
      for (int which = 0; which < 2; ++which) {
        BlockLanes own;
        LaneCodec<Code>::decode(pair_codes, which, by.at[0], own);
        turn(by);
        BlockTile::store(values + begin + which * core::kQuantizationBlock, own);
      }
    }
  }

  ZERO_EXT_HOST_DEVICE void block(std::int64_t number) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    BlockLanes own;
    LaneCodec<Code>::load_block(codes + begin, count - begin, scales[number], own);
    BlockTile::store_some(values + begin, 0, count - begin, own);
  }
};

}  // namespace zero_ext::cuda
