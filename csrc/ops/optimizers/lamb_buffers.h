// The tensors of LAMB, checked before anything changes without looking at their values.
#pragma once

#include <optional>

#include "../../core/optimizers/lamb.h"
#include "../checks.h"

namespace zero_ext::ops {

core::LambBuffers read_lamb_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& exp_avg_sq, const Tensor& grad,
                                    const std::optional<Tensor>& param,
                                    const std::optional<Tensor>& non_finite);

// int64 [S, 2, Superaccumulator::kEntries] for `segments` [S, 2], whose shape was checked.
std::int64_t* read_lamb_norms(const char* op, const Tensor& norms, const Tensor& segments);

}  // namespace zero_ext::ops
