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
    std::int64_t place;
  };
  using LowestOfLanes = Lowest[kLanesHere];

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    LowestOfLanes lowest{};
    over_runs(
        warp, warps, count, aligned, [&](std::int64_t i) { run(i, lowest); },
        [&](std::int64_t i) { block(i, lowest); });
    // Behind the loops, which so have no other accesses than those of their tiles.
    each_lane([&](int here, int) {
      const Lowest& own = lowest[here];
      if (own.value < 0.0F) {
        record_error(errors, {DeviceOp::quantize_blockwise, DeviceArgument::values, own.place,
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
        found.at[0] = LaneCodec<Code>::encode(own, which, pair_codes);
        turn(found);
      }
      store_codes(codes + begin, pair_codes);
    }
    if (lane_number(0) == 0) reinterpret_cast<RunScales*>(scales)[number] = found;
  }

  ZERO_EXT_HOST_DEVICE void block(std::int64_t number, LowestOfLanes& lowest) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    BlockLanes own;
    BlockTile::load_some(values + begin, 0, count - begin, 0.0F, own);
    check(own, begin, lowest);
    const float scale = LaneCodec<Code>::store_block(own, count - begin, codes + begin);
    if (lane_number(0) == 0) scales[number] = scale;
  }

  // A NaN in place of each negative value makes the block's scale NaN.
  ZERO_EXT_HOST_DEVICE void check(BlockLanes& own, std::int64_t begin,
                                  LowestOfLanes& lowest) const {
    if constexpr (!Code::is_signed) {
      each_lane([&](int here, int lane) {
        int at = -1;
        ZERO_EXT_UNROLL
        for (int k = 0; k < BlockTile::kHeld; ++k) {
          float& value = own.at[here][k];
          at = value < lowest[here].value ? k : at;
          lowest[here].value = value < lowest[here].value ? value : lowest[here].value;
          value = value < 0.0F ? std::numeric_limits<float>::quiet_NaN() : value;
        }
        if (at >= 0) lowest[here].place = begin + BlockTile::place(lane, at);
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
