// The tensors of Adam ops, checked before anything changes without looking at their values.
#pragma once

#include <optional>

#include "../core/adam.h"
#include "checks.h"

namespace zero_ext::ops {

core::AdamBuffers read_adam_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& exp_avg_sq, const Tensor& grad,
                                    const std::optional<Tensor>& param);

// int64 [S, 2] with float64 [S, 8]; returns S.
std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper);

// float32, 0-d.
void check_scale(const char* op, const Tensor& grad_scale);

}  // namespace zero_ext::ops
