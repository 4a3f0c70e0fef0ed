// Block-wise quantization as a warp of a grid runs it, one block at a time: kernels are called with
// a warp's number and the number of warps.
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
  bool aligned;  // values and codes start at multiples of kAccessBytes

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t i = warp; i < core::block_count(count); i += warps) {
      const std::int64_t begin = i * core::kQuantizationBlock;
      const std::int64_t rest = count - begin;
      const std::int64_t length = rest < core::kQuantizationBlock ? rest : core::kQuantizationBlock;
      const float scale =
          LaneCodec<Code>::store(load(begin, length), length, aligned, codes + begin);
      if (lane_number(0) == 0) scales[i] = scale;
    }
  }

  ZERO_EXT_HOST_DEVICE BlockLanes load(std::int64_t begin, std::int64_t length) const {
    BlockLanes block;
    each_lane([&](int own, int first) {
      const Pack<float> pack =
          load_pack(values + begin + first, PackRange::of(first, 0, length, aligned), 0.0F);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        if (!Code::is_signed && pack.values[k] < 0) {
          fail("quantize_blockwise", "values", begin + first + k, "element", pack.values[k],
               "zero or more for the unsigned code: pass signed=True");
        }
        block.at[own + k] = pack.values[k];
      }
    });
    return block;
  }
};

template <class Code>
struct DequantizeBlocks {
  const std::uint8_t* codes;
  const float* scales;
  std::int64_t count;
  float* values;
  bool aligned;  // codes and values start at multiples of kAccessBytes

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t i = warp; i < core::block_count(count); i += warps) {
      const std::int64_t begin = i * core::kQuantizationBlock;
      const std::int64_t length = count - begin;
      BlockLanes block;
      LaneCodec<Code>::load(codes + begin, scales[i], length, aligned, block);
      each_lane([&](int own, int first) {
        Pack<float> pack;
        ZERO_EXT_UNROLL
        for (int k = 0; k < kPackElements; ++k) pack.values[k] = block.at[own + k];
        store_pack(values + begin + first, pack, PackRange::of(first, 0, length, aligned));
      });
    }
  }
};

}  // namespace zero_ext::cuda
