// The arguments that all Adam ops share, read and checked before anything changes.
#pragma once

#include <vector>

#include "../core/adam.h"
#include "checks.h"

namespace zero_ext::ops {

// int64 [S, 2] of (begin, end), sorted, disjoint and inside [0, numel), with float64 [S, 8]
// hyper-parameters: lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize.
std::vector<core::AdamSegment> read_segments(const char* op, const Tensor& segments,
                                             const Tensor& hyper, float gradient_scale,
                                             std::int64_t numel);

// A finite float32 in a 0-d tensor.
float read_scale(const char* op, const Tensor& grad_scale);

}  // namespace zero_ext::ops
