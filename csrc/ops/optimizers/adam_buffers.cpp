#include "adam_buffers.h"

#include <array>

#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {

core::AdamBuffers read_adam_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& exp_avg_sq, const Tensor& grad,
                                    const std::optional<Tensor>& param,
                                    const std::optional<Tensor>& non_finite) {
  const std::array moments{Moment{"exp_avg", exp_avg}, Moment{"exp_avg_sq", exp_avg_sq}};
  const OptimizerTypes types = check_step(op, master, moments, grad, param, non_finite);
  return {master.mutable_data_ptr<float>(),
          exp_avg.mutable_data_ptr(),
          exp_avg_sq.mutable_data_ptr(),
          types.moments,
          grad.const_data_ptr(),
          types.grad,
          param ? param->mutable_data_ptr() : nullptr,
          types.param,
          read_flag(op, non_finite)};
}

}  // namespace zero_ext::ops
