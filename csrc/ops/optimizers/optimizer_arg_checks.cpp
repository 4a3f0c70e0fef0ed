#include "optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

core::NumericType check_moments(const char* op, std::span<const MomentTensor> moments,
                                std::int64_t numel) {
  const MomentTensor& first = moments.front();
  const core::NumericType type = check_numeric(first.tensor, {op, first.name});
  STD_TORCH_CHECK(type != core::NumericType::float16, op, ": argument '", first.name,
                  "': expected dtype Float or BFloat16, got Half. Convert it.");
  for (const MomentTensor& moment : moments) {
    check_dtype(moment.tensor, {op, moment.name}, first.tensor.scalar_type());
    check_flat(moment.tensor, {op, moment.name}, numel);
  }
  return type;
}

// Checks what every step has besides moments, whose memory is in `ranges`.
void check_others(const char* op, const Tensor& master, const Tensor& grad,
                  const OptionalTensor& param, const OptionalTensor& non_finite,
                  std::vector<MemoryRange> ranges) {
  check_flat(grad, {op, "grad"}, master.numel());
  ranges.push_back(memory_range(grad, {op, "grad"}));
  if (param) {
    check_flat(*param, {op, "param"}, master.numel());
    ranges.push_back(memory_range(*param, {op, "param"}));
  }
  if (non_finite) ranges.push_back(memory_range(*non_finite, {op, "non_finite"}));
  check_disjoint(std::move(ranges));
}

std::optional<core::NumericType> check_param(const char* op, const OptionalTensor& param) {
  if (!param) return std::nullopt;
  return check_numeric(*param, {op, "param"});
}

void check_quantized_moment(const char* op, const QuantizedTensors& moment, const std::string& name,
                            std::int64_t numel, std::vector<MemoryRange>& ranges) {
  const Argument codes{op, name + "_codes"};
  check_layout(moment.codes, codes);
  check_flat(moment.codes, codes, numel);
  check_quantized(op, moment, name + "_");
  ranges.push_back(memory_range(moment.codes, codes));
  ranges.push_back(memory_range(moment.scales, {op, name + "_scales"}));
}

}  // namespace

core::StepBuffers read_step_buffers(const char* op, const Tensor& master,
                                    std::span<const MomentTensor> moments, const Tensor& grad,
                                    const OptionalTensor& param, const OptionalTensor& non_finite) {
  check_dtype(master, {op, "master"}, ScalarType::Float);
  check_flat(master, {op, "master"}, master.numel());
  core::StepBuffers buffers{master.mutable_data_ptr<float>(),
                            {},
                            check_moments(op, moments, master.numel()),
                            grad.const_data_ptr(),
                            check_numeric(grad, {op, "grad"}),
                            param ? param->mutable_data_ptr() : nullptr,
                            check_param(op, param),
                            read_flag(op, non_finite)};
  std::vector<MemoryRange> ranges{memory_range(master, {op, "master"})};
  for (std::size_t m = 0; m < moments.size(); ++m) {
    buffers.moments[m] = moments[m].tensor.mutable_data_ptr();
    ranges.push_back(memory_range(moments[m].tensor, {op, moments[m].name}));
  }
  check_others(op, master, grad, param, non_finite, std::move(ranges));
  return buffers;
}

core::Adam8BitBuffers read_adam_8bit_buffers(const char* op, const Tensor& master,
                                             const QuantizedTensors& exp_avg,
                                             const QuantizedTensors& exp_avg_sq, const Tensor& grad,
                                             const OptionalTensor& param,
                                             const OptionalTensor& non_finite) {
  check_dtype(master, {op, "master"}, ScalarType::Float);
  const std::int64_t numel = master.numel();
  check_flat(master, {op, "master"}, numel);
  std::vector<MemoryRange> ranges{memory_range(master, {op, "master"})};
  check_quantized_moment(op, exp_avg, "exp_avg", numel, ranges);
  check_quantized_moment(op, exp_avg_sq, "exp_avg_sq", numel, ranges);
  const core::Adam8BitBuffers buffers{numel,
                                      master.mutable_data_ptr<float>(),
                                      exp_avg.codes.mutable_data_ptr<std::uint8_t>(),
                                      exp_avg_sq.codes.mutable_data_ptr<std::uint8_t>(),
                                      exp_avg.scales.mutable_data_ptr<float>(),
                                      exp_avg_sq.scales.mutable_data_ptr<float>(),
                                      grad.const_data_ptr(),
                                      check_numeric(grad, {op, "grad"}),
                                      param ? param->mutable_data_ptr() : nullptr,
                                      check_param(op, param),
                                      read_flag(op, non_finite)};
  check_others(op, master, grad, param, non_finite, std::move(ranges));
  return buffers;
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

std::int32_t* read_flag(const char* op, const OptionalTensor& non_finite) {
  if (!non_finite) return nullptr;
  const Argument argument{op, "non_finite"};
  check_dtype(*non_finite, argument, ScalarType::Int);
  check_flat(*non_finite, argument, 1);
  return non_finite->mutable_data_ptr<std::int32_t>();
}

std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper,
                            std::span<const core::HyperField> fields) {
  check_dtype(segments, {op, "segments"}, ScalarType::Long);
  check_dtype(hyper, {op, "hyper"}, ScalarType::Double);
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 2, op,
                  ": argument 'segments': expected shape [S, 2] (begin, end), got ",
                  shape_text(segments), ". Reshape it.");
  const std::int64_t count = segments.size(0);
  const auto columns = static_cast<std::int64_t>(fields.size());
  std::string names;
  for (const core::HyperField& each : fields) {
    names += (names.empty() ? "" : ", ") + std::string(text_of(each.field, core::kDeviceFields));
  }
  STD_TORCH_CHECK(hyper.dim() == 2 && hyper.size(0) == count && hyper.size(1) == columns, op,
                  ": argument 'hyper': expected shape [", count, ", ", columns, "] (", names,
                  "), got ", shape_text(hyper), ". Pass a row for each segment.");
  return count;
}

void check_scale(const char* op, const Tensor& grad_scale) {
  check_dtype(grad_scale, {op, "grad_scale"}, ScalarType::Float);
  STD_TORCH_CHECK(grad_scale.dim() == 0, op,
                  ": argument 'grad_scale': expected a 0-d tensor, got shape ",
                  shape_text(grad_scale), ". Pass grad_scale.squeeze().");
}

float read_scale(const char* op, const Tensor& grad_scale) {
  check_scale(op, grad_scale);
  return *grad_scale.const_data_ptr<float>();
}

void check_row(const char* op, std::int64_t i, std::span<const std::int64_t, 2> bounds,
               std::int64_t previous, std::int64_t numel, const core::HyperparameterError& error) {
  STD_TORCH_CHECK(bounds[0] >= previous && bounds[0] <= bounds[1] && bounds[1] <= numel, op,
                  ": segments[", i, "]: expected a range inside [", previous, ", ", numel,
                  "), got [", bounds[0], ", ", bounds[1],
                  "). Sort the segments and keep them disjoint.");
  STD_TORCH_CHECK(error.field == core::DeviceField::none, op, ": ",
                  text_of(error.field, core::kDeviceFields), " of hyper[", i, "]: expected ",
                  text_of(error.expected, core::kExpectedValues), ", got ", error.value,
                  ". Change the optimizer's setting.");
}

}  // namespace zero_ext::ops
