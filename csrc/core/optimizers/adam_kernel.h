// Adam over one range of its buffers. See optimizer_kernel.h on inclusion.
#pragma once

#include <cstdint>

#include "adam.h"
#include "adam_formula.h"
#include "optimizer_kernel.h"

namespace zero_ext::core {
namespace {

template <class V, class Moment, class Grad, class Param>
void run_adam(const AdamBuffers& buffers, const AdamCoefficients& coefficients, std::int64_t begin,
              std::int64_t end) {
  OptimizerLoop<V, AdamRule, Moment, Grad, Param>::run(
      {buffers.master,
       {static_cast<Moment*>(buffers.exp_avg), static_cast<Moment*>(buffers.exp_avg_sq)},
       static_cast<const Grad*>(buffers.grad),
       static_cast<Param*>(buffers.param),
       buffers.non_finite},
      coefficients, begin, end);
}

}  // namespace
}  // namespace zero_ext::core
