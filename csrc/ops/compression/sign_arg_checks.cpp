#include "sign_arg_checks.h"

namespace zero_ext::ops {

SignCompression read_compress_signs(const Tensor& payloads, const Tensor& errors,
                                    const Tensor& values, double factor, std::int64_t chunks) {
  constexpr const char* op = "compress_signs_";
  const core::NumericType type = check_numeric(values, {op, "values"});
  const std::int64_t numel = values.numel();
  check_flat(values, {op, "values"}, numel);
  const std::int64_t chunk_numel = check_chunks(op, numel, chunks);
  SignCompression result{read_signs({op, "messages"}, payloads, chunks, chunk_numel),
                         read_floats({op, "errors"}, errors, numel),
                         static_cast<const std::byte*>(values.const_data_ptr()),
                         type,
                         chunk_numel,
                         check_factor(op, factor)};
  check_disjoint({memory_range(payloads, {op, "messages"}), memory_range(errors, {op, "errors"}),
                  memory_range(values, {op, "values"})});
  return result;
}

SignExpansion read_expand_signs(const Tensor& out, const Tensor& payloads, double factor,
                                std::int64_t chunks) {
  constexpr const char* op = "expand_signs_";
  const core::NumericType type = check_numeric(out, {op, "out"});
  check_flat(out, {op, "out"}, out.numel());
  const std::int64_t chunk_numel = check_chunks(op, out.numel(), chunks);
  SignExpansion result{static_cast<std::byte*>(out.mutable_data_ptr()), type,
                       read_signs({op, "messages"}, payloads, chunks, chunk_numel), chunk_numel,
                       check_factor(op, factor)};
  check_disjoint({memory_range(out, {op, "out"}), memory_range(payloads, {op, "messages"})});
  return result;
}

SignSumArguments read_sum_signs(const Tensor& out, const Tensor& payloads, double factor) {
  constexpr const char* op = "sum_signs_";
  const std::int64_t numel = out.numel();
  SignSumArguments result{read_floats({op, "out"}, out, numel),
                          read_signs({op, "messages"}, payloads, -1, numel), numel,
                          check_factor(op, factor)};
  check_disjoint({memory_range(out, {op, "out"}), memory_range(payloads, {op, "messages"})});
  return result;
}

SignReduction read_reduce_signs(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                                double factor) {
  constexpr const char* op = "reduce_signs_";
  const std::int64_t numel = error.numel();
  SignReduction result{
      read_signs({op, "message"}, payload, 1, numel), read_floats({op, "error"}, error, numel),
      read_signs({op, "messages"}, payloads, -1, numel), numel, check_factor(op, factor)};
  check_disjoint({memory_range(payload, {op, "message"}), memory_range(error, {op, "error"}),
                  memory_range(payloads, {op, "messages"})});
  return result;
}

}  // namespace zero_ext::ops
