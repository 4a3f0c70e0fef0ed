// The tensors of Adam, checked before anything changes without looking at their values.
#pragma once

#include <optional>

#include "../../core/optimizers/adam.h"
#include "../checks.h"

namespace zero_ext::ops {

core::AdamBuffers read_adam_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& exp_avg_sq, const Tensor& grad,
                                    const std::optional<Tensor>& param,
                                    const std::optional<Tensor>& non_finite);

}  // namespace zero_ext::ops
