// zero_ext::quantize_blockwise and dequantize_blockwise: float32 to and from 8-bit dynamic codes.
#include <algorithm>
#include <tuple>

#include "../op_registration.h"
#include "blockwise_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrainBlocks = 64;

core::DynamicCode code_of(bool is_signed) {
  return is_signed ? core::DynamicCode::is_signed : core::DynamicCode::is_unsigned;
}

// Calls work(begin, count) for runs of whole blocks, the last of which may be shorter.
template <class Work>
void for_each_block(std::int64_t numel, const Work& work) {
  torch::stable::parallel_for(0, core::block_count(numel), kGrainBlocks,
                              [&](std::int64_t first, std::int64_t last) {
                                const std::int64_t begin = first * core::kQuantizationBlock;
                                const std::int64_t end = last * core::kQuantizationBlock;
                                work(begin, std::min(end, numel) - begin);
                              });
}

std::tuple<Tensor, Tensor> quantize_blockwise(const Tensor& values, bool is_signed) {
  constexpr const char* op = "quantize_blockwise";
  const std::int64_t numel = check_values(op, values);
  const auto* source = values.const_data_ptr<float>();
  if (!is_signed) {
    const auto* negative = std::find_if(source, source + numel, [](float x) { return x < 0; });
    STD_TORCH_CHECK(negative == source + numel, op, ": values[", negative - source,
                    "]: expected at least 0 with the unsigned code, got ", *negative,
                    ". Pass signed=True.");
  }
  const auto [codes, scales] = empty_quantized(values);
  auto* code = codes.mutable_data_ptr<std::uint8_t>();
  auto* scale = scales.mutable_data_ptr<float>();
  for_each_block(numel, [&](std::int64_t begin, std::int64_t count) {
    core::quantize_blockwise(source + begin, count, code_of(is_signed), code + begin,
                             scale + begin / core::kQuantizationBlock);
  });
  return {codes, scales};
}

Tensor dequantize_blockwise(const Tensor& codes, const Tensor& scales, bool is_signed) {
  constexpr const char* op = "dequantize_blockwise";
  const std::int64_t numel = check_quantized(op, {codes, scales});
  const Tensor values = empty_values(codes);
  const auto* code = codes.const_data_ptr<std::uint8_t>();
  const auto* scale = scales.const_data_ptr<float>();
  auto* target = values.mutable_data_ptr<float>();
  for_each_block(numel, [&](std::int64_t begin, std::int64_t count) {
    core::dequantize_blockwise(code + begin, scale + begin / core::kQuantizationBlock, count,
                               code_of(is_signed), target + begin);
  });
  return values;
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("quantize_blockwise(Tensor values, bool signed) -> (Tensor codes, Tensor scales)",
      TORCH_BOX(&quantize_blockwise));
  ops("dequantize_blockwise(Tensor codes, Tensor scales, bool signed) -> Tensor",
      TORCH_BOX(&dequantize_blockwise));
}

}  // namespace zero_ext::ops
