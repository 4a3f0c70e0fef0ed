// zero_ext::quantize_blockwise and dequantize_blockwise on CUDA devices.
#include <tuple>

#include "../../ops/compression/blockwise_arg_checks.h"
#include "../common/launch.cuh"
#include "blockwise_kernel.h"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

template <class Visit>
void with_code(bool is_signed, const Visit& visit) {
  if (is_signed) return visit(core::SignedDynamicCode{});
  visit(core::UnsignedDynamicCode{});
}

// The values are not looked at by the host: a negative one in the unsigned code is recorded.
std::tuple<Tensor, Tensor> quantize_blockwise(const Tensor& values, bool is_signed) {
  constexpr const char* op = "quantize_blockwise";
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const std::int64_t numel = ops::check_values(op, values);
  const ops::QuantizedTensors result = ops::empty_quantized(values);
  const auto* source = values.const_data_ptr<float>();
  auto* codes = result.codes.mutable_data_ptr<std::uint8_t>();
  auto* scales = result.scales.mutable_data_ptr<float>();
  with_code(is_signed, [&]<class Code>(Code) {
    launch_warps(
        op,
        QuantizeBlocks<Code>{device_errors(op), source, numel, codes, scales,
                             is_aligned(source) && is_aligned(codes) && is_aligned(scales)},
        run_count(numel));
  });
  return {result.codes, result.scales};
}

Tensor dequantize_blockwise(const Tensor& codes, const Tensor& scales, bool is_signed) {
  constexpr const char* op = "dequantize_blockwise";
  const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
  const std::int64_t numel = ops::check_quantized(op, {codes, scales});
  const Tensor values = ops::empty_values(codes);
  const auto* source = codes.const_data_ptr<std::uint8_t>();
  const auto* by = scales.const_data_ptr<float>();
  auto* target = values.mutable_data_ptr<float>();
  with_code(is_signed, [&]<class Code>(Code) {
    launch_warps(op,
                 DequantizeBlocks<Code>{source, by, numel, target,
                                        is_aligned(source) && is_aligned(by) && is_aligned(target)},
                 run_count(numel));
  });
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("quantize_blockwise", TORCH_BOX(&quantize_blockwise));
  library.impl("dequantize_blockwise", TORCH_BOX(&dequantize_blockwise));
}

}  // namespace zero_ext::cuda
