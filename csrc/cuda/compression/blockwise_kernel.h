// Block-wise quantization as a warp of a grid runs it: kernels are called with a warp's number and
// the number of warps.
#pragma once

#include <cstdint>
#include <limits>

#include "../common/error_recording.h"
#include "warp_block_codec.h"

namespace zero_ext::cuda {

// In the unsigned code, a block with a negative value is recorded and reads back as NaN.
template <class Code>
struct QuantizeBlocks {
  DeviceErrorRecord* errors;
  const float* values;
  std::int64_t count;
  std::uint8_t* codes;
  float* scales;
  bool aligned;  // values, codes and scales start at multiples of kAccessBytes

  // The lowest value that a lane has met, if that is negative.
  struct Lowest {
    float value;
    std::int64_t position;
  };
  using LowestOfLanes = Lowest[kThreadLanes];

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    LowestOfLanes lowest{};
    for_each_run(
        warp, warps, count, aligned, [&](std::int64_t i) { run(i, lowest); },
        [&](std::int64_t i) { block(i, lowest); });
    // Behind the loops, which so have no other accesses than those of their tiles.
    each_lane([&](int local, int) {
      const Lowest& own = lowest[local];
      if (own.value < 0.0F) {
        record_error(errors, {DeviceOp::quantize_blockwise, DeviceArgument::values, own.position,
                              DeviceField::entry, own.value, ExpectedValue::not_negative_unsigned});
      }
    });
  }

  ZERO_EXT_HOST_DEVICE void run(std::int64_t number, LowestOfLanes& lowest) const {
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
        check(own, first, lowest);
        found.at[0] = WarpBlockCodec<Code>::encode(own, which, pair_codes);
        rotate(found);
      }
      store_codes(codes + begin, pair_codes);
    }
    if (lane_number(0) == 0) reinterpret_cast<RunScales*>(scales)[number] = found;
  }

  ZERO_EXT_HOST_DEVICE void block(std::int64_t number, LowestOfLanes& lowest) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    BlockLanes own;
    BlockTile::load_partial(values + begin, 0, count - begin, 0.0F, own);
    check(own, begin, lowest);
    const float scale = WarpBlockCodec<Code>::store_block(own, count - begin, codes + begin);
    if (lane_number(0) == 0) scales[number] = scale;
  }

  // A NaN in place of each negative value makes the block's scale NaN.
  ZERO_EXT_HOST_DEVICE void check(BlockLanes& own, std::int64_t begin,
                                  LowestOfLanes& lowest) const {
    if constexpr (!Code::is_signed) {
      each_lane([&](int local, int lane) {
        int at = -1;
        ZERO_EXT_UNROLL
        for (int k = 0; k < BlockTile::kPerLane; ++k) {
          float& value = own.at[local][k];
          at = value < lowest[local].value ? k : at;
          lowest[local].value = value < lowest[local].value ? value : lowest[local].value;
          value = value < 0.0F ? std::numeric_limits<float>::quiet_NaN() : value;
        }
        if (at >= 0) lowest[local].position = begin + BlockTile::position(lane, at);
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
    for_each_run(
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
        WarpBlockCodec<Code>::decode(pair_codes, which, by.at[0], own);
        rotate(by);
        BlockTile::store(values + begin + which * core::kQuantizationBlock, own);
      }
    }
  }

  ZERO_EXT_HOST_DEVICE void block(std::int64_t number) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    BlockLanes own;
    WarpBlockCodec<Code>::load_block(codes + begin, count - begin, scales[number], own);
    BlockTile::store_partial(values + begin, 0, count - begin, own);
  }
};

}  // namespace zero_ext::cuda
