// The tensors of Adam with quantized moments, checked before anything changes without looking at
// their values.
#pragma once

#include <optional>

#include "../../core/optimizers/adam_8bit.h"
#include "../compression/blockwise_arg_checks.h"

namespace zero_ext::ops {

core::Adam8BitBuffers read_adam_8bit_buffers(const char* op, const Tensor& master,
                                             const QuantizedTensors& exp_avg,
                                             const QuantizedTensors& exp_avg_sq, const Tensor& grad,
                                             const std::optional<Tensor>& param,
                                             const std::optional<Tensor>& non_finite);

}  // namespace zero_ext::ops
