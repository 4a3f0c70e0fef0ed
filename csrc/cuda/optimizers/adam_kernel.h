// One-pass Adam / AdamW on a device: see step_kernel.h.
#pragma once

#include "../../core/adam.h"
#include "../../core/adam_factors_formula.h"
#include "../../core/adam_formula.h"
#include "step_kernel.h"

namespace zero_ext::cuda {

using PrepareAdamSegments = PrepareSegments<core::AdamHyper>;

template <class Moment, class Grad, class Param>
FlatStep<core::AdamRule, Moment, Grad, Param> adam_step_of(const core::AdamBuffers& buffers,
                                                           std::int64_t numel,
                                                           const core::AdamSegment* segments,
                                                           std::int64_t segment_count) {
  return {{buffers.master,
           {static_cast<Moment*>(buffers.exp_avg), static_cast<Moment*>(buffers.exp_avg_sq)},
           static_cast<const Grad*>(buffers.grad),
           static_cast<Param*>(buffers.param),
           buffers.non_finite},
          numel,
          segments,
          segment_count};
}

}  // namespace zero_ext::cuda
