#include "integer_block_arg_checks.h"

#include <utility>

namespace zero_ext::ops {
namespace {

BlockConversion read_conversion(const Argument& side, const Tensor& payloads, const Tensor& values,
                                const core::BlockFormat& format, std::int64_t chunks,
                                std::vector<std::int64_t> order) {
  const core::NumericType type = check_numeric(values, side);
  check_flat(values, side, values.numel());
  const std::int64_t chunk_numel = check_chunks(side.op, values.numel(), chunks);
  const Argument argument{side.op, "payloads"};
  BlockConversion result{read_blocks(argument, payloads, chunks, chunk_numel, format),
                         static_cast<std::byte*>(values.mutable_data_ptr()), type, chunk_numel,
                         check_order(side.op, std::move(order), chunks)};
  check_disjoint({memory_range(payloads, argument), memory_range(values, side)});
  return result;
}

}  // namespace

BlockConversion read_quantize(const Tensor& payloads, const Tensor& values,
                              const core::BlockFormat& format, std::int64_t chunks,
                              std::vector<std::int64_t> order) {
  return read_conversion({"quantize_", "values"}, payloads, values, format, chunks,
                         std::move(order));
}

BlockConversion read_dequantize(const Tensor& out, const Tensor& payloads,
                                const core::BlockFormat& format, std::int64_t chunks) {
  return read_conversion({"dequantize_", "out"}, payloads, out, format, chunks, {});
}

BlockSum read_sum_quantized(const Tensor& out, const Tensor& payloads,
                            const core::BlockFormat& format, double factor) {
  constexpr const char* op = "sum_quantized_";
  const std::int64_t numel = out.numel();
  BlockSum result{read_floats({op, "out"}, out, numel),
                  read_blocks({op, "payloads"}, payloads, -1, numel, format), numel,
                  check_factor(op, factor)};
  check_disjoint({memory_range(out, {op, "out"}), memory_range(payloads, {op, "payloads"})});
  return result;
}

BlockReduction read_requantize(const Tensor& payloads_out, const Tensor& payloads_in,
                               const core::BlockFormat& from, const core::BlockFormat& to,
                               double factor, std::int64_t chunks) {
  constexpr const char* op = "requantize_";
  const Argument out{op, "payloads_out"};
  const Argument in{op, "payloads_in"};
  STD_TORCH_CHECK(from.block == to.block, op, ": out_format: expected blocks of ", from.block,
                  " elements as in format, got ", to.block, ". Pass equal blocks.");
  const std::int64_t bytes = check_chunks(op, payloads_out.numel(), chunks);
  const std::int64_t numel = to.max_elements(bytes);
  STD_TORCH_CHECK(numel >= 0, label(out), "expected chunks * payload_bytes(elements) bytes, got ",
                  bytes, " for each of ", chunks, " chunks. Allocate that many.");
  BlockReduction result{read_blocks(out, payloads_out, chunks, numel, to),
                        read_blocks(in, payloads_in, -1, numel, from), numel,
                        check_factor(op, factor)};
  STD_TORCH_CHECK(result.in.count % chunks == 0, label(in), "expected a multiple of the ", chunks,
                  " chunks as the number of payloads, got ", result.in.count,
                  ". Pass the payloads of all chunks.");
  check_disjoint({memory_range(payloads_out, out), memory_range(payloads_in, in)});
  return result;
}

}  // namespace zero_ext::ops
