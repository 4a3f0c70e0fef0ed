#include "blockwise_arg_checks.h"

namespace zero_ext::ops {

std::int64_t check_values(const char* op, const Tensor& values) {
  check_dtype(values, {op, "values"}, ScalarType::Float);
  check_flat(values, {op, "values"}, values.numel());
  return values.numel();
}

std::int64_t check_quantized(const char* op, const QuantizedTensors& quantized,
                             const std::string& prefix) {
  const Argument codes{op, prefix + "codes"};
  const Argument scales{op, prefix + "scales"};
  const std::int64_t numel = quantized.codes.numel();
  check_dtype(quantized.codes, codes, ScalarType::Byte);
  check_flat(quantized.codes, codes, numel);
  check_dtype(quantized.scales, scales, ScalarType::Float);
  check_flat(quantized.scales, scales, core::block_count(numel));
  return numel;
}

QuantizedTensors empty_quantized(const Tensor& values) {
  const std::int64_t numel = values.numel();
  return {torch::stable::empty({numel}, ScalarType::Byte, std::nullopt, values.device()),
          torch::stable::empty({core::block_count(numel)}, ScalarType::Float, std::nullopt,
                               values.device())};
}

Tensor empty_values(const Tensor& codes) {
  return torch::stable::empty({codes.numel()}, ScalarType::Float, std::nullopt, codes.device());
}

}  // namespace zero_ext::ops
