// The tensors of Lion, checked before anything changes without looking at their values.
#pragma once

#include <optional>

#include "../../core/optimizers/lion.h"
#include "../checks.h"

namespace zero_ext::ops {

core::LionBuffers read_lion_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& grad, const std::optional<Tensor>& param,
                                    const std::optional<Tensor>& non_finite);

}  // namespace zero_ext::ops
