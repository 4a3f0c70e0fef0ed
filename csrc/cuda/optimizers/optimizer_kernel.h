// An optimizer's step over flat buffers, as a warp of a grid runs it.
//
// Kernels are function objects called with a warp's number (or a thread's) and their count, so that
// the host can run them too. They give the same result for every size of the grid.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../core/simd/vector_scalar.h"
#include "../common/warp_tile.h"
#include "segment_search.h"

namespace zero_ext::cuda {

struct NoParam {};

// core::StepBuffers, typed; param is null where Param is NoParam. Rules are described in
// core/optimizers/optimizer_rules.h.
template <class Rule, class Moment, class Grad, class Param>
struct OptimizerPointers {
  float* master;
  Moment* moments[Rule::kMoments];
  const Grad* grad;
  Param* param;
  std::int32_t* non_finite;  // as of core::StepBuffers

  // Whether all start at multiples of kAccessBytes.
  bool aligned() const {
    bool result = is_aligned(master) && is_aligned(grad) && is_aligned(param);
    for (const Moment* moment : moments) result = result && is_aligned(moment);
    return result;
  }
};

// One element. `poison` becomes NaN if a new value is not finite, and stays as it is otherwise.
template <class Rule, class Moment, class Grad, class Param>
ZERO_EXT_HOST_DEVICE void update_element(float& master, Moment* const (&moments)[Rule::kMoments],
                                         Grad grad, [[maybe_unused]] Param& param,
                                         const typename Rule::Coefficients& coefficients,
                                         float& poison) {
  using Scalar = core::ScalarVector;
  float values[1 + Rule::kMoments];
  values[0] = Scalar::load(&master);
  ZERO_EXT_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m) values[1 + m] = Scalar::load(moments[m]);
  Rule::template update<Scalar>(values, Scalar::load(&grad), coefficients);
  ZERO_EXT_UNROLL
  for (int m = 0; m <= Rule::kMoments; ++m) poison += values[m] * 0.0F;
  Scalar::store(&master, values[0]);
  ZERO_EXT_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m) Scalar::store(moments[m], values[1 + m]);
  if constexpr (!std::is_same_v<Param, NoParam>) Scalar::store(&param, values[0]);
}

// At the end of a thread's work. Threads that raise a flag write the same value.
ZERO_EXT_HOST_DEVICE void report(float poison, std::int32_t* non_finite) {
  if (poison != 0.0F && non_finite != nullptr) *non_finite = 1;
}

template <class Rule, class Moment, class Grad, class Param>
struct OptimizerStep {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;
  static constexpr int kMoments = Rule::kMoments;
  using Coefficients = typename Rule::Coefficients;
  using Segment = core::OptimizerSegment<Rule>;
  using Tile = WarpTileOf<2, float, Moment, Grad>;

  OptimizerPointers<Rule, Moment, Grad, Param> at;
  std::int64_t numel;
  const Segment* segments;
  std::int64_t segment_count;
  bool aligned;

  OptimizerStep(const OptimizerPointers<Rule, Moment, Grad, Param>& pointers, std::int64_t elements,
                const Segment* prepared, std::int64_t count)
      : at(pointers),
        numel(elements),
        segments(prepared),
        segment_count(count),
        aligned(pointers.aligned()) {}

  // Over buffers whose elements have these types.
  static OptimizerStep of(const core::StepBuffers& buffers, std::int64_t elements,
                          const Segment* prepared, std::int64_t count) {
    OptimizerPointers<Rule, Moment, Grad, Param> pointers{buffers.master,
                                                          {},
                                                          static_cast<const Grad*>(buffers.grad),
                                                          static_cast<Param*>(buffers.param),
                                                          buffers.non_finite};
    for (int m = 0; m < kMoments; ++m) {
      pointers.moments[m] = static_cast<Moment*>(buffers.moments[m]);
    }
    return {pointers, elements, prepared, count};
  }

  std::int64_t tiles() const { return (numel + Tile::kElements - 1) / Tile::kElements; }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    float poisons[kThreadLanes];
    each_lane([&](int local, int) { poisons[local] = 0.0F; });
    const std::int64_t stride = warps * Tile::kElements;
    for (std::int64_t begin = warp * Tile::kElements; begin < numel;) {
      const std::int64_t i = first_ending_after(segments, segment_count, begin);
      if (i == segment_count) break;
      const Segment current = segments[i];
      if (aligned && current.begin <= begin && begin + Tile::kElements <= current.end) {
        do {
          full_tile(begin, current.coefficients, poisons);
          begin += stride;
        } while (begin + Tile::kElements <= current.end);
      } else {
        partial_tile(begin, i, poisons);
        begin += stride;
      }
    }
    each_lane([&](int local, int) { report(poisons[local], at.non_finite); });
  }

  // What the segments from `i` on hold of the tile at `begin`.
  ZERO_EXT_HOST_DEVICE void partial_tile(std::int64_t begin, std::int64_t i,
                                         float (&poisons)[kThreadLanes]) const {
    const std::int64_t end = begin + Tile::kElements;
    for (; i < segment_count && segments[i].begin < end; ++i) {
      const Segment current = segments[i];
      for_each_strided(
          current.begin > begin ? current.begin : begin, current.end < end ? current.end : end,
          [&](int local, std::int64_t k) { element(k, current.coefficients, poisons[local]); });
    }
  }

  ZERO_EXT_HOST_DEVICE void full_tile(std::int64_t begin, const Coefficients& coefficients,
                                      float (&poisons)[kThreadLanes]) const {
    typename Tile::template Fragment<float> masters;
    typename Tile::template Fragment<Moment> moments[kMoments];
    typename Tile::template Fragment<Grad> gradients;
    typename Tile::template Fragment<Param> params;
    Tile::load(at.master + begin, masters);
    ZERO_EXT_UNROLL
    for (int m = 0; m < kMoments; ++m) Tile::load(at.moments[m] + begin, moments[m]);
    Tile::load(at.grad + begin, gradients);
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < Tile::kPerLane; ++k) {
        Moment* own[kMoments];
        ZERO_EXT_UNROLL
        for (int m = 0; m < kMoments; ++m) own[m] = &moments[m].at[local][k];
        update_element<Rule>(masters.at[local][k], own, gradients.at[local][k], params.at[local][k],
                             coefficients, poisons[local]);
      }
    });
    Tile::store(at.master + begin, masters);
    ZERO_EXT_UNROLL
    for (int m = 0; m < kMoments; ++m) Tile::store(at.moments[m] + begin, moments[m]);
    if constexpr (has_param) Tile::store(at.param + begin, params);
  }

  ZERO_EXT_HOST_DEVICE void element(std::int64_t i, const Coefficients& coefficients,
                                    float& poison) const {
    Param unused;
    Param* target = &unused;
    if constexpr (has_param) target = at.param + i;
    Moment* own[kMoments];
    ZERO_EXT_UNROLL
    for (int m = 0; m < kMoments; ++m) own[m] = at.moments[m] + i;
    update_element<Rule>(at.master[i], own, at.grad[i], *target, coefficients, poison);
  }
};

}  // namespace zero_ext::cuda
