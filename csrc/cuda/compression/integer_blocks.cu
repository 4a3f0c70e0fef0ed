// zero_ext::quantize_, dequantize_, sum_quantized_ and requantize_ on CUDA devices.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "../../ops/compression/payload_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "integer_blocks_kernel.h"

namespace zero_ext::cuda {
namespace {

using core::BlockFormat;
using ops::Tensor;

// Calls visit(IntegerCode) with the code of a format.
template <class Visit>
void with_code(const BlockFormat& format, const Visit& visit) {
  if (format.bits == 4) {
    if (format.is_symmetric) return visit(core::IntegerCode<4, true>{});
    return visit(core::IntegerCode<4, false>{});
  }
  if (format.is_symmetric) return visit(core::IntegerCode<8, true>{});
  visit(core::IntegerCode<8, false>{});
}

// Calls visit(std::integral_constant<int, bits>).
template <class Visit>
void with_bits(const BlockFormat& format, const Visit& visit) {
  if (format.bits == 4) return visit(std::integral_constant<int, 4>{});
  visit(std::integral_constant<int, 8>{});
}

IntegerPayloads<std::uint8_t> target_of(const ops::Payloads& payloads, const BlockFormat& format,
                                        std::int64_t chunk_numel) {
  return {reinterpret_cast<std::uint8_t*>(payloads.data), format, chunk_numel};
}

IntegerPayloads<const std::uint8_t> source_of(const ops::Payloads& payloads,
                                              const BlockFormat& format, std::int64_t chunk_numel) {
  return {reinterpret_cast<const std::uint8_t*>(payloads.data), format, chunk_numel};
}

template <class T>
IntegerValues<T> values_of(const ops::PayloadConversion& of) {
  IntegerValues<T> result{reinterpret_cast<const T*>(of.values), of.chunk_numel, false, {}};
  const std::vector<std::int64_t>& order = of.order;
  result.is_ordered = !std::is_sorted(order.begin(), order.end());
  if (!result.is_ordered) return result;
  STD_TORCH_CHECK(order.size() <= result.kMax, "quantize_: argument 'order': expected at most ",
                  result.kMax, " chunks on a CUDA device, got ", order.size(),
                  ". Put the values in order before.");
  std::transform(order.begin(), order.end(), result.order,
                 [](std::int64_t chunk) { return static_cast<std::int16_t>(chunk); });
  return result;
}

void quantize(const Tensor& payloads, const Tensor& values, std::int64_t bits, bool symmetric,
              std::int64_t block, std::int64_t chunks, std::vector<std::int64_t> order) {
  constexpr const char* op = "quantize_";
  const torch::stable::accelerator::DeviceGuard guard(payloads.get_device_index());
  const BlockFormat format = ops::check_format(op, bits, symmetric, block);
  const ops::PayloadConversion of =
      ops::read_quantize(payloads, values, format, chunks, std::move(order));
  with_type(of.type, [&]<class T>(std::type_identity<T>) {
    const IntegerValues<T> source = values_of<T>(of);
    with_code(format, [&]<class Code>(Code) {
      const QuantizeIntegers<IntegerValues<T>, Code> kernel{
          source, target_of(of.payloads, format, of.chunk_numel), chunks};
      launch_warps(op, kernel, kernel.work());
    });
  });
}

void dequantize(const Tensor& out, const Tensor& payloads, std::int64_t bits, bool symmetric,
                std::int64_t block, std::int64_t chunks) {
  constexpr const char* op = "dequantize_";
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const BlockFormat format = ops::check_format(op, bits, symmetric, block);
  const ops::PayloadConversion of = ops::read_dequantize(out, payloads, format, chunks);
  with_type(of.type, [&]<class T>(std::type_identity<T>) {
    with_bits(format, [&](auto width) {
      using Sum = IntegerSum<width, true>;
      const Sum sum{source_of(of.payloads, format, of.chunk_numel), 1, 0, 1, 1.0F};
      const WriteIntegers<Sum, T> kernel{sum, chunks, false, reinterpret_cast<T*>(of.values)};
      launch_warps(op, kernel, kernel.work());
    });
  });
}

void sum_quantized(const Tensor& out, const Tensor& payloads, std::int64_t bits, bool symmetric,
                   std::int64_t block, double factor, bool accumulate) {
  constexpr const char* op = "sum_quantized_";
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const BlockFormat format = ops::check_format(op, bits, symmetric, block);
  const ops::PayloadSum of = ops::read_sum_quantized(out, payloads, format, factor);
  with_bits(format, [&](auto width) {
    using Sum = IntegerSum<width, false, 2>;
    const Sum sum{source_of(of.payloads, format, of.numel), 0, 1, of.payloads.count, of.factor};
    const WriteIntegers<Sum, float> kernel{sum, 1, accumulate, of.out};
    launch_warps(op, kernel, kernel.work());
  });
}

void requantize(const Tensor& payloads_out, const Tensor& payloads_in, std::int64_t bits,
                bool symmetric, std::int64_t block, std::int64_t out_bits, bool out_symmetric,
                std::int64_t out_block, double factor, std::int64_t chunks) {
  constexpr const char* op = "requantize_";
  const torch::stable::accelerator::DeviceGuard guard(payloads_out.get_device_index());
  const BlockFormat from = ops::check_format(op, bits, symmetric, block);
  const BlockFormat to = ops::check_format(op, out_bits, out_symmetric, out_block);
  const ops::PayloadReduction of =
      ops::read_requantize(payloads_out, payloads_in, from, to, factor, chunks);
  with_bits(from, [&](auto width) {
    const IntegerSum<width> sum{source_of(of.in, from, of.chunk_numel), 1, chunks,
                                of.in.count / chunks, of.factor};
    with_code(to, [&]<class Code>(Code) {
      const QuantizeIntegers<IntegerSum<width>, Code> kernel{
          sum, target_of(of.out, to, of.chunk_numel), chunks};
      launch_warps(op, kernel, kernel.work());
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("quantize_", TORCH_BOX(&quantize));
  library.impl("dequantize_", TORCH_BOX(&dequantize));
  library.impl("sum_quantized_", TORCH_BOX(&sum_quantized));
  library.impl("requantize_", TORCH_BOX(&requantize));
}

}  // namespace zero_ext::cuda
