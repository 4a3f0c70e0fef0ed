#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {
namespace {

core::NumericType check_moments(const char* op, std::span<const Moment> moments,
                                std::int64_t numel) {
  const Moment& first = moments.front();
  const core::NumericType type = check_numeric(first.tensor, {op, first.name});
  STD_TORCH_CHECK(type != core::NumericType::float16, op, ": argument '", first.name,
                  "': expected dtype Float or BFloat16, got Half. Convert it.");
  for (const Moment& moment : moments) {
    check_dtype(moment.tensor, {op, moment.name}, first.tensor.scalar_type());
    check_flat(moment.tensor, {op, moment.name}, numel);
  }
  return type;
}

}  // namespace

OptimizerTypes check_step(const char* op, const Tensor& master, std::span<const Moment> moments,
                          const Tensor& grad, const std::optional<Tensor>& param,
                          const std::optional<Tensor>& non_finite) {
  check_dtype(master, {op, "master"}, ScalarType::Float);
  const std::int64_t numel = master.numel();
  check_flat(master, {op, "master"}, numel);
  OptimizerTypes types{check_moments(op, moments, numel), check_numeric(grad, {op, "grad"}),
                       std::nullopt};
  check_flat(grad, {op, "grad"}, numel);
  std::vector<MemoryRange> ranges{memory_range(master, {op, "master"})};
  for (const Moment& moment : moments) {
    ranges.push_back(memory_range(moment.tensor, {op, moment.name}));
  }
  ranges.push_back(memory_range(grad, {op, "grad"}));
  if (param) {
    types.param = check_numeric(*param, {op, "param"});
    check_flat(*param, {op, "param"}, numel);
    ranges.push_back(memory_range(*param, {op, "param"}));
  }
  if (read_flag(op, non_finite) != nullptr) {
    ranges.push_back(memory_range(*non_finite, {op, "non_finite"}));
  }
  check_disjoint(std::move(ranges));
  return types;
}

std::int32_t* read_flag(const char* op, const std::optional<Tensor>& non_finite) {
  if (!non_finite) return nullptr;
  const Argument argument{op, "non_finite"};
  check_dtype(*non_finite, argument, ScalarType::Int);
  check_flat(*non_finite, argument, 1);
  return non_finite->mutable_data_ptr<std::int32_t>();
}

std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper,
                            int columns, const char* names) {
  check_dtype(segments, {op, "segments"}, ScalarType::Long);
  check_dtype(hyper, {op, "hyper"}, ScalarType::Double);
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 2, op,
                  ": argument 'segments': expected shape [S, 2] (begin, end), got ",
                  shape_text(segments), ". Reshape it.");
  const std::int64_t count = segments.size(0);
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

}  // namespace zero_ext::ops
