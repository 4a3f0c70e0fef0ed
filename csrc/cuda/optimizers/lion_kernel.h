// One-pass Lion on a device: see step_kernel.h.
#pragma once

#include "../../core/lion.h"
#include "../../core/lion_factors_formula.h"
#include "../../core/lion_formula.h"
#include "step_kernel.h"

namespace zero_ext::cuda {

template <class Moment, class Grad, class Param>
FlatStep<core::LionRule, Moment, Grad, Param> lion_step_of(const core::LionBuffers& buffers,
                                                           std::int64_t numel,
                                                           const core::LionSegment* segments,
                                                           std::int64_t segment_count) {
  return {{buffers.master,
           {static_cast<Moment*>(buffers.exp_avg)},
           static_cast<const Grad*>(buffers.grad),
           static_cast<Param*>(buffers.param),
           buffers.non_finite},
          numel,
          segments,
          segment_count};
}

}  // namespace zero_ext::cuda
