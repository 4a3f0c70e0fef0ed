// Lion over one range of its buffers. See optimizer_kernel.h on inclusion.
#pragma once

#include <cstdint>

#include "lion.h"
#include "lion_formula.h"
#include "optimizer_kernel.h"

namespace zero_ext::core {
namespace {

template <class V, class Moment, class Grad, class Param>
void run_lion(const LionBuffers& buffers, const LionCoefficients& coefficients, std::int64_t begin,
              std::int64_t end) {
  OptimizerLoop<V, LionRule, Moment, Grad, Param>::run({buffers.master,
                                                        {static_cast<Moment*>(buffers.exp_avg)},
                                                        static_cast<const Grad*>(buffers.grad),
                                                        static_cast<Param*>(buffers.param),
                                                        buffers.non_finite},
                                                       coefficients, begin, end);
}

}  // namespace
}  // namespace zero_ext::core
