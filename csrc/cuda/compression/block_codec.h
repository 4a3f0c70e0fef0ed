// A block of 256 elements as the lanes of a warp hold it, eight neighbouring elements each, to and
// from an 8-bit dynamic code.
#pragma once

#include <cstdint>

#include "../../core/blockwise/block_scale_formula.h"
#include "../../core/blockwise/blockwise.h"
#include "../../core/blockwise/dynamic_code_formula.h"
#include "../../core/vector_scalar.h"
#include "../machine/vector_access.h"
#include "../machine/warp.h"

namespace zero_ext::cuda {

static_assert(kWarpLanes * kPackElements == core::kQuantizationBlock);

struct BlockLanes {
  float at[kLanesHere * kPackElements];
};

// Calls visit(own, first) for each lane: where its elements are in BlockLanes and in the block.
template <class Visit>
ZERO_EXT_HOST_DEVICE void each_lane(const Visit& visit) {
  ZERO_EXT_UNROLL
  for (int here = 0; here < kLanesHere; ++here) {
    visit(here * kPackElements, lane_number(here) * kPackElements);
  }
}

// The value of a block's largest magnitude, in every lane; see scale_of_key.
ZERO_EXT_HOST_DEVICE float scale_of(const BlockLanes& block) {
  std::uint32_t highest = 0;
  ZERO_EXT_UNROLL
  for (const float& value : block.at) {
    const std::uint32_t key = core::ScalarVector::magnitude_keys(&value);
    highest = key > highest ? key : highest;
  }
  return core::scale_of_key(max_of_warp(highest));
}

template <class Code>
struct LaneCodec {
  using Scalar = core::ScalarVector;

  // Reads the codes of a block's `count` elements; the others become zeros.
  static ZERO_EXT_HOST_DEVICE void load(const std::uint8_t* codes, float scale, std::int64_t count,
                                        bool aligned, BlockLanes& block) {
    each_lane([&](int own, int first) {
      const PackRange range = PackRange::of(first, 0, count, aligned);
      const Pack<std::uint8_t> pack = load_pack(codes + first, range, Code::zero);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        const float code = Scalar::load_bytes(&pack.values[k]);
        block.at[own + k] = Scalar::mul(core::decode_dynamic<Scalar, Code>(code), scale);
      }
    });
  }

  // Writes the codes of a block's `count` elements; returns the scale, in every lane.
  static ZERO_EXT_HOST_DEVICE float store(const BlockLanes& block, std::int64_t count, bool aligned,
                                          std::uint8_t* codes) {
    const float scale = scale_of(block);
    const bool divides = core::scale_divides(scale);
    const float inverse = divides ? 1 / scale : 0.0F;
    each_lane([&](int own, int first) {
      Pack<std::uint8_t> pack;
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        pack.values[k] = Code::zero;
        if (!divides) continue;
        const float value = Scalar::mul(block.at[own + k], inverse);
        Scalar::store_bytes(&pack.values[k], core::encode_dynamic<Scalar, Code>(value));
      }
      store_pack(codes + first, pack, PackRange::of(first, 0, count, aligned));
    });
    return divides ? scale : core::scale_of_zeros(scale);
  }
};

}  // namespace zero_ext::cuda
