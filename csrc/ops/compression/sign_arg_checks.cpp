#include "sign_arg_checks.h"

namespace zero_ext::ops {

SignCompression read_compress_1bit(const Tensor& payloads, const Tensor& errors,
                                   const Tensor& values, double factor, std::int64_t chunks) {
  constexpr const char* op = "compress_1bit_";
  const core::NumericType type = check_numeric(values, {op, "values"});
  const std::int64_t numel = values.numel();
  check_flat(values, {op, "values"}, numel);
  const std::int64_t chunk_numel = check_chunks(op, numel, chunks);
  SignCompression result{read_sign_bits({op, "payloads"}, payloads, chunks, chunk_numel),
                         read_floats({op, "errors"}, errors, numel),
                         static_cast<const std::byte*>(values.const_data_ptr()),
                         type,
                         chunk_numel,
                         check_factor(op, factor)};
  check_disjoint({memory_range(payloads, {op, "payloads"}), memory_range(errors, {op, "errors"}),
                  memory_range(values, {op, "values"})});
  return result;
}

SignExpansion read_decompress_1bit(const Tensor& out, const Tensor& payloads, double factor,
                                   std::int64_t chunks) {
  constexpr const char* op = "decompress_1bit_";
  const core::NumericType type = check_numeric(out, {op, "out"});
  check_flat(out, {op, "out"}, out.numel());
  const std::int64_t chunk_numel = check_chunks(op, out.numel(), chunks);
  SignExpansion result{static_cast<std::byte*>(out.mutable_data_ptr()), type,
                       read_sign_bits({op, "payloads"}, payloads, chunks, chunk_numel), chunk_numel,
                       check_factor(op, factor)};
  check_disjoint({memory_range(out, {op, "out"}), memory_range(payloads, {op, "payloads"})});
  return result;
}

SignSumArguments read_sum_1bit(const Tensor& out, const Tensor& payloads, double factor) {
  constexpr const char* op = "sum_1bit_";
  const std::int64_t numel = out.numel();
  SignSumArguments result{read_floats({op, "out"}, out, numel),
                          read_sign_bits({op, "payloads"}, payloads, -1, numel), numel,
                          check_factor(op, factor)};
  check_disjoint({memory_range(out, {op, "out"}), memory_range(payloads, {op, "payloads"})});
  return result;
}

SignReduction read_reduce_1bit(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                               double factor) {
  constexpr const char* op = "reduce_1bit_";
  const std::int64_t numel = error.numel();
  SignReduction result{
      read_sign_bits({op, "payload"}, payload, 1, numel), read_floats({op, "error"}, error, numel),
      read_sign_bits({op, "payloads"}, payloads, -1, numel), numel, check_factor(op, factor)};
  check_disjoint({memory_range(payload, {op, "payload"}), memory_range(error, {op, "error"}),
                  memory_range(payloads, {op, "payloads"})});
  return result;
}

}  // namespace zero_ext::ops
