// One-pass Adam / AdamW with moments quantized block-wise, as a warp of a grid runs it: a
// block's moments are float32 in the lanes' registers between reading and writing its codes.
#pragma once

#include <cstdint>

#include "../../core/optimizers/adam_8bit.h"
#include "../../core/optimizers/adam_rule.h"
#include "../compression/warp_block_codec.h"
#include "optimizer_kernel.h"

namespace zero_ext::cuda {

template <class Grad, class Param>
struct AdamBlocks {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;
  using ExpAvg = WarpBlockCodec<core::SignedDynamicCode>;
  using ExpAvgSq = WarpBlockCodec<core::UnsignedDynamicCode>;

  std::int64_t numel;
  float* master;
  std::uint8_t* exp_avg_codes;
  std::uint8_t* exp_avg_sq_codes;
  float* exp_avg_scales;
  float* exp_avg_sq_scales;
  const Grad* grad;
  Param* param;
  std::int32_t* non_finite;  // as of OptimizerPointers
  const core::AdamSegment* segments;
  std::int64_t segment_count;
  bool aligned;  // all start at multiples of kAccessBytes

  static AdamBlocks of(const core::Adam8BitBuffers& buffers, const core::AdamSegment* segments,
                       std::int64_t segment_count) {
    const bool aligned = is_aligned(buffers.master) && is_aligned(buffers.exp_avg_codes) &&
                         is_aligned(buffers.exp_avg_sq_codes) && is_aligned(buffers.grad) &&
                         is_aligned(buffers.param) && is_aligned(buffers.exp_avg_scales) &&
                         is_aligned(buffers.exp_avg_sq_scales);
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

  // First the runs of blocks that are one segment's, then all other blocks.
  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    float poisons[kThreadLanes];
    each_lane([&](int local, int) { poisons[local] = 0.0F; });
    for (std::int64_t i = warp; i < full_runs();) {
      const std::int64_t s = segment_of(i);
      if (s == segment_count) {
        i += warps;
        continue;
      }
      const core::AdamSegment current = segments[s];
      do {
        run(i, current.coefficients, poisons);
        i += warps;
      } while ((i + 1) * kRunElements <= current.end);
    }
    for (std::int64_t i = warp; i < run_count(numel); i += warps) {
      if (i < full_runs() && segment_of(i) < segment_count) continue;
      const std::int64_t last = core::block_count(numel) - i * kRunBlocks;
      for (int k = 0; k < kRunBlocks && k < last; ++k) block(i * kRunBlocks + k, poisons);
    }
    each_lane([&](int local, int) { report(poisons[local], non_finite); });
  }

  ZERO_EXT_HOST_DEVICE std::int64_t full_runs() const { return aligned ? numel / kRunElements : 0; }

  // The segment that has all of a run; `segment_count` if none has.
  ZERO_EXT_HOST_DEVICE std::int64_t segment_of(std::int64_t run) const {
    const std::int64_t begin = run * kRunElements;
    const std::int64_t i = first_ending_after(segments, segment_count, begin);
    const bool has_all =
        i < segment_count && segments[i].begin <= begin && begin + kRunElements <= segments[i].end;
    return has_all ? i : segment_count;
  }

  // A run of blocks that are one segment's.
  ZERO_EXT_HOST_DEVICE void run(std::int64_t number,
                                const core::AdamRule::Coefficients& coefficients,
                                float (&poisons)[kThreadLanes]) const {
    RunScales by = reinterpret_cast<const RunScales*>(exp_avg_scales)[number];
    RunScales by_sq = reinterpret_cast<const RunScales*>(exp_avg_sq_scales)[number];
    ZERO_EXT_UNROLL_BY(1)
    for (int pair = 0; pair < kRunBlocks; pair += 2) {
      const std::int64_t begin = number * kRunElements + pair * core::kQuantizationBlock;
      CodeLanes codes;
      CodeLanes codes_sq;
      load_codes(exp_avg_codes + begin, codes);
      load_codes(exp_avg_sq_codes + begin, codes_sq);
      ZERO_EXT_UNROLL
      for (int which = 0; which < 2; ++which) {
        float& scale = by.at[0];
        float& scale_sq = by_sq.at[0];
        BlockLanes exp_avg;
        BlockLanes exp_avg_sq;
        ExpAvg::decode(codes, which, scale, exp_avg);
        ExpAvgSq::decode(codes_sq, which, scale_sq, exp_avg_sq);
        update_block(begin + which * core::kQuantizationBlock, coefficients, exp_avg, exp_avg_sq,
                     poisons);
        scale = ExpAvg::encode(exp_avg, which, codes);
        scale_sq = ExpAvgSq::encode(exp_avg_sq, which, codes_sq);
        rotate(by);
        rotate(by_sq);
      }
      store_codes(exp_avg_codes + begin, codes);
      store_codes(exp_avg_sq_codes + begin, codes_sq);
    }
    if (lane_number(0) != 0) return;
    reinterpret_cast<RunScales*>(exp_avg_scales)[number] = by;
    reinterpret_cast<RunScales*>(exp_avg_sq_scales)[number] = by_sq;
  }

  // A block of one segment's.
  ZERO_EXT_HOST_DEVICE void update_block(std::int64_t begin,
                                         const core::AdamRule::Coefficients& coefficients,
                                         BlockLanes& exp_avg, BlockLanes& exp_avg_sq,
                                         float (&poisons)[kThreadLanes]) const {
    BlockLanes masters;
    BlockTile::Fragment<Grad> gradients;
    BlockTile::Fragment<Param> params;
    BlockTile::load(master + begin, masters);
    BlockTile::load(grad + begin, gradients);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < BlockTile::kPerLane; ++k) {
        float* const moments[] = {&exp_avg.at[local][k], &exp_avg_sq.at[local][k]};
        update_element<core::AdamRule>(masters.at[local][k], moments, gradients.at[local][k],
                                       params.at[local][k], coefficients, poisons[local]);
      }
    });
    BlockTile::store(master + begin, masters);
    if constexpr (has_param) BlockTile::store(param + begin, params);
  }

  // A block of which segments hold some elements.
  ZERO_EXT_HOST_DEVICE void block(std::int64_t number, float (&poisons)[kThreadLanes]) const {
    const std::int64_t begin = number * core::kQuantizationBlock;
    const std::int64_t end = begin + core::kQuantizationBlock;
    std::int64_t i = first_ending_after(segments, segment_count, begin);
    while (reaches(i, end) && segments[i].begin == segments[i].end) ++i;
    if (!reaches(i, end)) return;  // no segment has an element here: every bit stays
    const std::int64_t count = numel - begin;
    BlockLanes exp_avg;
    BlockLanes exp_avg_sq;
    ExpAvg::load_block(exp_avg_codes + begin, count, exp_avg_scales[number], exp_avg);
    ExpAvgSq::load_block(exp_avg_sq_codes + begin, count, exp_avg_sq_scales[number], exp_avg_sq);
    for (; reaches(i, end); ++i) update_partial(segments[i], begin, exp_avg, exp_avg_sq, poisons);
    const float scale = ExpAvg::store_block(exp_avg, count, exp_avg_codes + begin);
    const float scale_sq = ExpAvgSq::store_block(exp_avg_sq, count, exp_avg_sq_codes + begin);
    if (lane_number(0) != 0) return;
    exp_avg_scales[number] = scale;
    exp_avg_sq_scales[number] = scale_sq;
  }

  ZERO_EXT_HOST_DEVICE bool reaches(std::int64_t segment, std::int64_t end) const {
    return segment < segment_count && segments[segment].begin < end;
  }

  // The elements that a segment has in a block.
  ZERO_EXT_HOST_DEVICE void update_partial(const core::AdamSegment& segment, std::int64_t begin,
                                           BlockLanes& exp_avg, BlockLanes& exp_avg_sq,
                                           float (&poisons)[kThreadLanes]) const {
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < BlockTile::kPerLane; ++k) {
        const std::int64_t at = begin + BlockTile::position(lane, k);
        if (at < segment.begin || segment.end <= at) continue;
        float* const moments[] = {&exp_avg.at[local][k], &exp_avg_sq.at[local][k]};
        Param unused;
        Param* target = &unused;
        if constexpr (has_param) target = param + at;
        update_element<core::AdamRule>(master[at], moments, grad[at], *target, segment.coefficients,
                                       poisons[local]);
      }
    });
  }
};

}  // namespace zero_ext::cuda
