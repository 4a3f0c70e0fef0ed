#include "payload_arg_checks.h"

#include <cmath>
#include <numeric>
#include <utility>

namespace zero_ext::ops {
namespace {

// What is asked of a format here, of signs; core::BlockFormat has the same.
struct SignFormat {
  static std::int64_t payload_bytes(std::int64_t numel) { return core::sign_payload_bytes(numel); }
  static std::int64_t words(std::int64_t numel) { return core::sign_words(numel); }
};

// Payloads of `numel` elements each, exactly `count` unless that is -1 (then one or more).
template <class Format>
Payloads read_payloads(const Argument& argument, const Tensor& payloads, std::int64_t count,
                       std::int64_t numel, const Format& format) {
  const std::int64_t bytes = format.payload_bytes(numel);
  const std::int64_t total = payloads.numel();
  check_dtype(payloads, argument, ScalarType::Byte);
  check_flat(payloads, argument, count >= 0 ? count * bytes : total);
  if (count < 0) {
    count = bytes == 0 ? 1 : total / bytes;
    STD_TORCH_CHECK(count > 0 && total == count * bytes, label(argument),
                    "expected one or more payloads of ", bytes, " bytes each, got ", total,
                    " bytes. Allocate a multiple of that.");
  }
  auto* data = static_cast<std::byte*>(payloads.mutable_data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(data) % 4 == 0, label(argument),
                  "expected an address that is a multiple of 4, got ", data,
                  ". Begin a view at a multiple of 4 bytes, or allocate memory for it.");
  return {data, count, bytes, format.words(numel)};
}

// `numel` / `chunks`; refused unless that is a whole number.
std::int64_t check_chunks(const char* op, std::int64_t numel, std::int64_t chunks) {
  STD_TORCH_CHECK(chunks > 0 && numel % chunks == 0, op, ": elements: expected a multiple of the ",
                  chunks, " chunks, got ", numel, ". Pad them.");
  return numel / chunks;
}

float check_factor(const char* op, double factor) {
  const auto result = static_cast<float>(factor);
  STD_TORCH_CHECK(std::isfinite(result), op,
                  ": factor: expected a number that is finite in float32, got ", factor,
                  ". Pass a smaller one.");
  return result;
}

// Flat with `numel` elements.
float* read_floats(const Argument& argument, const Tensor& tensor, std::int64_t numel) {
  check_dtype(tensor, argument, ScalarType::Float);
  check_flat(tensor, argument, numel);
  return tensor.mutable_data_ptr<float>();
}

// Part of the values that slot p of the payloads holds, for each p; `order` empty: p itself.
std::vector<std::int64_t> check_order(const char* op, std::vector<std::int64_t> order,
                                      std::int64_t chunks) {
  if (order.empty()) {
    order.resize(static_cast<std::size_t>(chunks));
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
  STD_TORCH_CHECK(static_cast<std::int64_t>(order.size()) == chunks, op,
                  ": order: expected each of the ", chunks, " chunks once, got ", order.size(),
                  " numbers. Pass a permutation.");
  std::vector<bool> named(order.size());
  for (const std::int64_t chunk : order) {
    STD_TORCH_CHECK(chunk >= 0 && chunk < chunks && !named[static_cast<std::size_t>(chunk)], op,
                    ": order: expected each of 0 to ", chunks - 1, " once, got ", chunk,
                    chunk >= 0 && chunk < chunks ? " twice" : "", ". Pass a permutation.");
    named[static_cast<std::size_t>(chunk)] = true;
  }
  return order;
}

template <class Format>
PayloadConversion read_conversion(const Argument& side, const Tensor& payloads,
                                  const Tensor& values, const Format& format, std::int64_t chunks) {
  const core::NumericType type = check_numeric(values, side);
  check_flat(values, side, values.numel());
  const std::int64_t numel = check_chunks(side.op, values.numel(), chunks);
  const Argument argument{side.op, "payloads"};
  check_disjoint({memory_range(payloads, argument), memory_range(values, side)});
  return {read_payloads(argument, payloads, chunks, numel, format),
          static_cast<std::byte*>(values.mutable_data_ptr()), type, numel};
}

template <class Format>
PayloadSum read_sum(const char* op, const Tensor& out, const Tensor& payloads, const Format& format,
                    double factor) {
  const std::int64_t numel = out.numel();
  const Argument target{op, "out"};
  const Argument source{op, "payloads"};
  PayloadSum result{read_floats(target, out, numel),
                    read_payloads(source, payloads, -1, numel, format), numel,
                    check_factor(op, factor)};
  check_disjoint({memory_range(out, target), memory_range(payloads, source)});
  return result;
}

}  // namespace

core::BlockFormat check_format(const char* op, std::int64_t bits, bool symmetric,
                               std::int64_t block) {
  STD_TORCH_CHECK(bits == 4 || bits == 8, op, ": format: expected 4 or 8 bits, got ", bits,
                  ". Pass one of these.");
  STD_TORCH_CHECK(
      block > 0 && block <= core::kMaxIntegerBlock && block % core::kIntegerBlockUnit == 0, op,
      ": format: expected blocks of a multiple of ", core::kIntegerBlockUnit, " elements up to ",
      core::kMaxIntegerBlock, ", got ", block, ". Pass such a block.");
  return {static_cast<int>(bits), symmetric, block};
}

PayloadConversion read_quantize(const Tensor& payloads, const Tensor& values,
                                const core::BlockFormat& format, std::int64_t chunks,
                                std::vector<std::int64_t> order) {
  constexpr const char* op = "quantize_";
  PayloadConversion result = read_conversion({op, "values"}, payloads, values, format, chunks);
  result.order = check_order(op, std::move(order), chunks);
  return result;
}

PayloadConversion read_dequantize(const Tensor& out, const Tensor& payloads,
                                  const core::BlockFormat& format, std::int64_t chunks) {
  return read_conversion({"dequantize_", "out"}, payloads, out, format, chunks);
}

PayloadSum read_sum_quantized(const Tensor& out, const Tensor& payloads,
                              const core::BlockFormat& format, double factor) {
  return read_sum("sum_quantized_", out, payloads, format, factor);
}

PayloadReduction read_requantize(const Tensor& payloads_out, const Tensor& payloads_in,
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
  PayloadReduction result{read_payloads(out, payloads_out, chunks, numel, to),
                          read_payloads(in, payloads_in, -1, numel, from), numel,
                          check_factor(op, factor)};
  STD_TORCH_CHECK(result.in.count % chunks == 0, label(in), "expected a multiple of the ", chunks,
                  " chunks as the number of payloads, got ", result.in.count,
                  ". Pass the payloads of all chunks.");
  check_disjoint({memory_range(payloads_out, out), memory_range(payloads_in, in)});
  return result;
}

PayloadConversion read_compress_1bit(const Tensor& payloads, const Tensor& errors,
                                     const Tensor& values, double factor, std::int64_t chunks) {
  constexpr const char* op = "compress_1bit_";
  PayloadConversion result =
      read_conversion({op, "values"}, payloads, values, SignFormat{}, chunks);
  result.errors = read_floats({op, "errors"}, errors, values.numel());
  result.factor = check_factor(op, factor);
  check_disjoint({memory_range(payloads, {op, "payloads"}), memory_range(errors, {op, "errors"}),
                  memory_range(values, {op, "values"})});
  return result;
}

PayloadConversion read_decompress_1bit(const Tensor& out, const Tensor& payloads, double factor,
                                       std::int64_t chunks) {
  constexpr const char* op = "decompress_1bit_";
  PayloadConversion result = read_conversion({op, "out"}, payloads, out, SignFormat{}, chunks);
  result.factor = check_factor(op, factor);
  return result;
}

PayloadSum read_sum_1bit(const Tensor& out, const Tensor& payloads, double factor) {
  return read_sum("sum_1bit_", out, payloads, SignFormat{}, factor);
}

PayloadReduction read_reduce_1bit(const Tensor& payload, const Tensor& error,
                                  const Tensor& payloads, double factor) {
  constexpr const char* op = "reduce_1bit_";
  const Argument out{op, "payload"};
  const Argument in{op, "payloads"};
  const Argument left{op, "error"};
  const std::int64_t numel = error.numel();
  PayloadReduction result{read_payloads(out, payload, 1, numel, SignFormat{}),
                          read_payloads(in, payloads, -1, numel, SignFormat{}), numel,
                          check_factor(op, factor), read_floats(left, error, numel)};
  check_disjoint(
      {memory_range(payload, out), memory_range(error, left), memory_range(payloads, in)});
  return result;
}

}  // namespace zero_ext::ops
