#include "lion_buffers.h"

#include <array>

#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {

core::LionBuffers read_lion_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& grad, const std::optional<Tensor>& param,
                                    const std::optional<Tensor>& non_finite) {
  const std::array moments{Moment{"exp_avg", exp_avg}};
  const OptimizerTypes types = check_step(op, master, moments, grad, param, non_finite);
  return {master.mutable_data_ptr<float>(),
          exp_avg.mutable_data_ptr(),
          types.moments,
          grad.const_data_ptr(),
          types.grad,
          param ? param->mutable_data_ptr() : nullptr,
          types.param,
          read_flag(op, non_finite)};
}

}  // namespace zero_ext::ops
