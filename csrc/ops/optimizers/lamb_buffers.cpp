#include "lamb_buffers.h"

#include <array>

#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {

core::LambBuffers read_lamb_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
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

std::int64_t* read_lamb_norms(const char* op, const Tensor& norms, const Tensor& segments) {
  constexpr std::int64_t entries = core::Superaccumulator::kEntries;
  const Argument argument{op, "norms"};
  check_dtype(norms, argument, ScalarType::Long);
  const std::int64_t count = segments.size(0);
  STD_TORCH_CHECK(
      norms.dim() == 3 && norms.size(0) == count && norms.size(1) == 2 && norms.size(2) == entries,
      label(argument), "expected shape [", count, ", 2, ", entries,
      "] (segments, sums of squares of weights and of updates), got ", shape_text(norms),
      ". Allocate it so.");
  return norms.mutable_data_ptr<std::int64_t>();
}

}  // namespace zero_ext::ops
