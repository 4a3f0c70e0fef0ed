#include "adam_8bit_buffers.h"

#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {
namespace {

void check_moment(const char* op, const QuantizedTensors& moment, const std::string& name,
                  std::int64_t numel, std::vector<MemoryRange>& ranges) {
  const Argument codes{op, name + "_codes"};
  check_layout(moment.codes, codes);
  check_flat(moment.codes, codes, numel);
  check_quantized(op, moment, name + "_");
  ranges.push_back(memory_range(moment.codes, codes));
  ranges.push_back(memory_range(moment.scales, {op, name + "_scales"}));
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
  std::vector<MemoryRange> ranges{memory_range(master, {op, "master"})};
  check_moment(op, exp_avg, "exp_avg", numel, ranges);
  check_moment(op, exp_avg_sq, "exp_avg_sq", numel, ranges);
  const core::NumericType grad_type = check_numeric(grad, {op, "grad"});
  check_flat(grad, {op, "grad"}, numel);
  ranges.push_back(memory_range(grad, {op, "grad"}));
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
    ranges.push_back(memory_range(*param, {op, "param"}));
  }
  if (non_finite) ranges.push_back(memory_range(*non_finite, {op, "non_finite"}));
  check_disjoint(std::move(ranges));
  return buffers;
}

}  // namespace zero_ext::ops
