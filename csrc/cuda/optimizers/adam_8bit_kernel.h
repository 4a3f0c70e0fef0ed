// One-pass Adam / AdamW with moments quantized block-wise, as a warp of a grid runs it: one block
// at a time, whose moments are float32 in the lanes' registers between reading and writing its
// codes.
#pragma once

#include <cstdint>

#include "../../core/adam_formula.h"
#include "../../core/blockwise/adam_8bit.h"
#include "../compression/block_codec.h"
#include "step_kernel.h"

namespace zero_ext::cuda {

template <class Grad, class Param>
struct AdamBlocks {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;
  using ExpAvg = LaneCodec<core::SignedDynamicCode>;
  using ExpAvgSq = LaneCodec<core::UnsignedDynamicCode>;

  std::int64_t numel;
  float* master;
  std::uint8_t* exp_avg_codes;
  std::uint8_t* exp_avg_sq_codes;
  float* exp_avg_scales;
  float* exp_avg_sq_scales;
  const Grad* grad;
  Param* param;
  std::int32_t* non_finite;  // as of StepPointers
  const core::AdamSegment* segments;
  std::int64_t segment_count;
  bool aligned;  // master, codes, grad and param start at multiples of kAccessBytes

  static AdamBlocks of(const core::Adam8BitBuffers& buffers, const core::AdamSegment* segments,
                       std::int64_t segment_count) {
    const bool aligned = is_aligned(buffers.master) && is_aligned(buffers.exp_avg_codes) &&
                         is_aligned(buffers.exp_avg_sq_codes) && is_aligned(buffers.grad) &&
                         is_aligned(buffers.param);
    return {buffers.count,
            buffers.master,
            buffers.exp_avg_codes,
            buffers.exp_avg_sq_codes,
            buffers.exp_avg_scales,
            buffers.exp_avg_sq_scales,
            static_cast<const Grad*>(buffers.grad),
            static_cast<Param*>(buffers.param),
            buffers.non_finite,
            segments,
            segment_count,
            aligned};
  }

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t i = warp; i < core::block_count(numel); i += warps) block(i);
  }

  ZERO_EXT_HOST_DEVICE void block(std::int64_t number) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    const std::int64_t end = begin + core::kQuantizationBlock;
    std::int64_t i = first_ending_after(segments, segment_count, begin);
    while (reaches(i, end) && segments[i].begin == segments[i].end) ++i;
    if (!reaches(i, end)) return;  // no segment has an element here: every bit stays
    const std::int64_t count = numel - begin;
    BlockLanes exp_avg;
    BlockLanes exp_avg_sq;
    ExpAvg::load(exp_avg_codes + begin, exp_avg_scales[number], count, aligned, exp_avg);
    ExpAvgSq::load(exp_avg_sq_codes + begin, exp_avg_sq_scales[number], count, aligned, exp_avg_sq);
    for (; reaches(i, end); ++i) update(segments[i], begin, exp_avg, exp_avg_sq);
    const float scale = ExpAvg::store(exp_avg, count, aligned, exp_avg_codes + begin);
    const float scale_sq = ExpAvgSq::store(exp_avg_sq, count, aligned, exp_avg_sq_codes + begin);
    if (lane_number(0) != 0) return;
    exp_avg_scales[number] = scale;
    exp_avg_sq_scales[number] = scale_sq;
  }

  ZERO_EXT_HOST_DEVICE bool reaches(std::int64_t segment, std::int64_t end) const {
    return segment < segment_count && segments[segment].begin < end;
  }

  // The elements that a segment has in a block.
  ZERO_EXT_HOST_DEVICE void update(const core::AdamSegment& segment, std::int64_t begin,
                                   BlockLanes& exp_avg, BlockLanes& exp_avg_sq) const {
    each_lane([&](int own, int first) {
      const std::int64_t at = begin + first;
      const PackRange range = PackRange::of(at, segment.begin, segment.end, aligned);
      Pack<float> masters = load_pack(master + at, range, 0.0F);
      const Pack<Grad> gradients = load_pack(grad + at, range, Grad{});
      Pack<Param> params;
      float fault = 0.0F;
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) {
        if (!range.holds(k)) continue;
        float* const moments[] = {&exp_avg.at[own + k], &exp_avg_sq.at[own + k]};
        update_element<core::AdamRule>(masters.values[k], moments, gradients.values[k],
                                       params.values[k], segment.factors, fault);
      }
      report(fault, non_finite);
      store_pack(master + at, masters, range);
      if constexpr (has_param) store_pack(param + at, params, range);
    });
  }
};

}  // namespace zero_ext::cuda
