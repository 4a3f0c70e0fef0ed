// zero_ext::quantize_, dequantize_, sum_quantized_ and requantize_: blocks of small integers.
#include "../../core/compression/integer_blocks.h"

#include "../op_registration.h"
#include "block_ranges.h"
#include "payload_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::BlockFormat;

constexpr std::int64_t kGrain = 32768;

template <class Work>
void for_each_integer_block_range(std::int64_t chunks, std::int64_t numel,
                                  const BlockFormat& format, const Work& work) {
  for_each_block_range(chunks, numel, format.block, kGrain / format.block, work);
}

core::PayloadTarget target_of(const Payloads& payloads, std::int64_t payload,
                              const BlockFormat& format, std::int64_t block) {
  return payloads.target(payload, block * format.words(format.block), block * format.scales());
}

void quantize(const Tensor& payloads, const Tensor& values, std::int64_t bits, bool symmetric,
              std::int64_t block, std::int64_t chunks, std::vector<std::int64_t> order) {
  const BlockFormat format = check_format("quantize_", bits, symmetric, block);
  const PayloadConversion of = read_quantize(payloads, values, format, chunks, std::move(order));
  for_each_integer_block_range(
      chunks, of.chunk_numel, format,
      [&](std::int64_t slot, std::int64_t first, std::int64_t begin, std::int64_t count) {
        const std::int64_t chunk = of.order[static_cast<std::size_t>(slot)];
        core::quantize_blocks(of.at(chunk, begin), of.type, count, format,
                              target_of(of.payloads, slot, format, first));
      });
}

void dequantize(const Tensor& out, const Tensor& payloads, std::int64_t bits, bool symmetric,
                std::int64_t block, std::int64_t chunks) {
  const BlockFormat format = check_format("dequantize_", bits, symmetric, block);
  const PayloadConversion of = read_dequantize(out, payloads, format, chunks);
  for_each_integer_block_range(
      chunks, of.chunk_numel, format,
      [&](std::int64_t chunk, std::int64_t first, std::int64_t begin, std::int64_t count) {
        const core::PayloadTarget source = target_of(of.payloads, chunk, format, first);
        core::dequantize_blocks({source.words, source.scales}, count, format, of.at(chunk, begin),
                                of.type);
      });
}

void sum_quantized(const Tensor& out, const Tensor& payloads, std::int64_t bits, bool symmetric,
                   std::int64_t block, double factor, bool accumulate) {
  const BlockFormat format = check_format("sum_quantized_", bits, symmetric, block);
  const PayloadSum of = read_sum_quantized(out, payloads, format, factor);
  const std::vector<core::PayloadSource> each = of.payloads.every(0, 1);
  for_each_integer_block_range(
      1, of.numel, format,
      [&](std::int64_t, std::int64_t first, std::int64_t begin, std::int64_t count) {
        core::sum_quantized(each, first, count, format, of.factor, accumulate, of.out + begin);
      });
}

void requantize(const Tensor& payloads_out, const Tensor& payloads_in, std::int64_t bits,
                bool symmetric, std::int64_t block, std::int64_t out_bits, bool out_symmetric,
                std::int64_t out_block, double factor, std::int64_t chunks) {
  const BlockFormat from = check_format("requantize_", bits, symmetric, block);
  const BlockFormat to = check_format("requantize_", out_bits, out_symmetric, out_block);
  const PayloadReduction of = read_requantize(payloads_out, payloads_in, from, to, factor, chunks);
  std::vector<std::vector<core::PayloadSource>> each;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) each.push_back(of.in.every(chunk, chunks));
  for_each_integer_block_range(
      chunks, of.chunk_numel, to,
      [&](std::int64_t chunk, std::int64_t first, std::int64_t, std::int64_t count) {
        core::requantize_blocks(each[static_cast<std::size_t>(chunk)], first, count, from, to,
                                of.factor, target_of(of.out, chunk, to, first));
      });
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("quantize_(Tensor(a!) payloads, Tensor values, int bits, bool symmetric, int block, int "
      "chunks, int[] order) -> ()",
      TORCH_BOX(&quantize));
  ops("dequantize_(Tensor(a!) out, Tensor payloads, int bits, bool symmetric, int block, int "
      "chunks) -> ()",
      TORCH_BOX(&dequantize));
  ops("sum_quantized_(Tensor(a!) out, Tensor payloads, int bits, bool symmetric, int block, float "
      "factor, bool accumulate) -> ()",
      TORCH_BOX(&sum_quantized));
  ops("requantize_(Tensor(a!) payloads_out, Tensor payloads_in, int bits, bool symmetric, int "
      "block, int out_bits, bool out_symmetric, int out_block, float factor, int chunks) -> ()",
      TORCH_BOX(&requantize));
}

}  // namespace zero_ext::ops
