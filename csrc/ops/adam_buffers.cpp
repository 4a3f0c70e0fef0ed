#include "adam_buffers.h"

#include "../core/adam_factors_formula.h"

namespace zero_ext::ops {

core::AdamBuffers read_adam_buffers(const char* op, const Tensor& master, const Tensor& exp_avg,
                                    const Tensor& exp_avg_sq, const Tensor& grad,
                                    const std::optional<Tensor>& param) {
  check_dtype(master, {op, "master"}, ScalarType::Float);
  const std::int64_t numel = master.numel();
  check_flat(master, {op, "master"}, numel);
  const core::NumericType moments = check_numeric(exp_avg, {op, "exp_avg"});
  STD_TORCH_CHECK(moments != core::NumericType::float16, op,
                  ": argument 'exp_avg' has dtype Half; it must be Float or BFloat16");
  check_flat(exp_avg, {op, "exp_avg"}, numel);
  check_dtype(exp_avg_sq, {op, "exp_avg_sq"}, exp_avg.scalar_type());
  check_flat(exp_avg_sq, {op, "exp_avg_sq"}, numel);
  const core::NumericType grad_type = check_numeric(grad, {op, "grad"});
  check_flat(grad, {op, "grad"}, numel);
  core::AdamBuffers buffers{master.mutable_data_ptr<float>(),
                            exp_avg.mutable_data_ptr(),
                            exp_avg_sq.mutable_data_ptr(),
                            moments,
                            grad.const_data_ptr(),
                            grad_type,
                            nullptr,
                            std::nullopt};
  std::vector<Extent> extents{extent(master, {op, "master"}), extent(exp_avg, {op, "exp_avg"}),
                              extent(exp_avg_sq, {op, "exp_avg_sq"}), extent(grad, {op, "grad"})};
  if (param) {
    buffers.param_type = check_numeric(*param, {op, "param"});
    check_flat(*param, {op, "param"}, numel);
    buffers.param = param->mutable_data_ptr();
    extents.push_back(extent(*param, {op, "param"}));
  }
  check_disjoint(std::move(extents));
  return buffers;
}

std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper) {
  check_dtype(segments, {op, "segments"}, ScalarType::Long);
  check_dtype(hyper, {op, "hyper"}, ScalarType::Double);
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 2, op,
                  ": argument 'segments' has shape ", shape_text(segments),
                  "; it must be [S, 2] (begin, end)");
  const std::int64_t count = segments.size(0);
  STD_TORCH_CHECK(
      hyper.dim() == 2 && hyper.size(0) == count && hyper.size(1) == core::kAdamHyperParameters, op,
      ": argument 'hyper' has shape ", shape_text(hyper), "; it must be [", count,
      ", 8] (lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize)");
  return count;
}

void check_scale(const char* op, const Tensor& grad_scale) {
  check_dtype(grad_scale, {op, "grad_scale"}, ScalarType::Float);
  STD_TORCH_CHECK(grad_scale.dim() == 0, op, ": argument 'grad_scale' has shape ",
                  shape_text(grad_scale), "; it must be a 0-d tensor");
}

}  // namespace zero_ext::ops
