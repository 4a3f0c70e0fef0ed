#include "adam_8bit_buffers.h"

#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {
namespace {

void check_moment(const char* op, const QuantizedTensors& moment, const std::string& name,
                  std::int64_t numel, std::vector<Extent>& extents) {
  const Argument codes{op, name + "_codes"};
  check_layout(moment.codes, codes);
  check_flat(moment.codes, codes, numel);
  check_quantized(op, moment, name + "_");
  extents.push_back(extent(moment.codes, codes));
  extents.push_back(extent(moment.scales, {op, name + "_scales"}));
}

}  // namespace

core::Adam8BitBuffers read_adam_8bit_buffers(const char* op, const Tensor& master,
                                             const QuantizedTensors& exp_avg,
                                             const QuantizedTensors& exp_avg_sq, const Tensor& grad,
                                             const std::optional<Tensor>& param,
                                             const std::optional<Tensor>& non_finite) {
  check_dtype(master, {op, "master"}, ScalarType::Float);
  const std::int64_t numel = master.numel();
  check_flat(master, {op, "master"}, numel);
  std::vector<Extent> extents{extent(master, {op, "master"})};
  check_moment(op, exp_avg, "exp_avg", numel, extents);
  check_moment(op, exp_avg_sq, "exp_avg_sq", numel, extents);
  const core::NumericType grad_type = check_numeric(grad, {op, "grad"});
  check_flat(grad, {op, "grad"}, numel);
  extents.push_back(extent(grad, {op, "grad"}));
  core::Adam8BitBuffers buffers{numel,
                                master.mutable_data_ptr<float>(),
                                exp_avg.codes.mutable_data_ptr<std::uint8_t>(),
                                exp_avg_sq.codes.mutable_data_ptr<std::uint8_t>(),
                                exp_avg.scales.mutable_data_ptr<float>(),
                                exp_avg_sq.scales.mutable_data_ptr<float>(),
                                grad.const_data_ptr(),
                                grad_type,
                                nullptr,
                                std::nullopt,
                                read_flag(op, non_finite)};
  if (param) {
    buffers.param_type = check_numeric(*param, {op, "param"});
    check_flat(*param, {op, "param"}, numel);
    buffers.param = param->mutable_data_ptr();
    extents.push_back(extent(*param, {op, "param"}));
  }
  if (non_finite) extents.push_back(extent(*non_finite, {op, "non_finite"}));
  check_disjoint(std::move(extents));
  return buffers;
}

}  // namespace zero_ext::ops
