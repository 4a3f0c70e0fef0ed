// zero_ext::quantize_, dequantize_, sum_quantized_ and requantize_: blocks of small integers.
#include "../../core/compression/integer_blocks.h"

#include "integer_block_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::BlockFormat;

constexpr std::int64_t kGrain = 32768;

// Calls work(payload, block, begin, count) for runs of whole blocks of `numel` elements in each of
// `chunks`, the last block of which may be shorter.
template <class Work>
void for_each_block_range(std::int64_t chunks, std::int64_t numel, const BlockFormat& format,
                          const Work& work) {
  const std::int64_t blocks = format.blocks(numel);
  torch::stable::parallel_for(
      0, chunks * blocks, kGrain / format.block, [&](std::int64_t begin, std::int64_t end) {
        core::for_each_chunk(
            begin, end, blocks, [&](std::int64_t chunk, std::int64_t first, std::int64_t last) {
              const std::int64_t from = first * format.block;
              work(chunk, first, from, std::min(last * format.block, numel) - from);
            });
      });
}

template <class Payload>
Payload from_block(Payload payload, const BlockFormat& format, std::int64_t block) {
  return {payload.words + block * format.words(format.block),
          payload.scales + block * format.scales()};
}

void quantize(const Tensor& payloads, const Tensor& values, std::int64_t bits, bool symmetric,
              std::int64_t block, std::int64_t chunks, std::vector<std::int64_t> order) {
  const BlockFormat format = check_format("quantize_", bits, symmetric, block);
  const BlockConversion arguments =
      read_quantize(payloads, values, format, chunks, std::move(order));
  for_each_block_range(
      chunks, arguments.chunk_numel, format,
      [&](std::int64_t slot, std::int64_t first, std::int64_t begin, std::int64_t count) {
        const std::int64_t chunk = arguments.order[static_cast<std::size_t>(slot)];
        core::quantize_blocks(arguments.at(chunk, begin), arguments.type, count, format,
                              from_block(arguments.payloads.target(slot), format, first));
      });
}

void dequantize(const Tensor& out, const Tensor& payloads, std::int64_t bits, bool symmetric,
                std::int64_t block, std::int64_t chunks) {
  const BlockFormat format = check_format("dequantize_", bits, symmetric, block);
  const BlockConversion arguments = read_dequantize(out, payloads, format, chunks);
  for_each_block_range(
      chunks, arguments.chunk_numel, format,
      [&](std::int64_t chunk, std::int64_t first, std::int64_t begin, std::int64_t count) {
        core::dequantize_blocks(from_block(arguments.payloads.source(chunk), format, first), count,
                                format, arguments.at(chunk, begin), arguments.type);
      });
}

void sum_quantized(const Tensor& out, const Tensor& payloads, std::int64_t bits, bool symmetric,
                   std::int64_t block, double factor, bool accumulate) {
  const BlockFormat format = check_format("sum_quantized_", bits, symmetric, block);
  const BlockSum arguments = read_sum_quantized(out, payloads, format, factor);
  const std::vector<core::PayloadSource> each = arguments.payloads.every(0, 1);
  for_each_block_range(
      1, arguments.numel, format,
      [&](std::int64_t, std::int64_t first, std::int64_t begin, std::int64_t count) {
        core::sum_quantized(each, first, count, format, arguments.factor, accumulate,
                            arguments.out + begin);
      });
}

void requantize(const Tensor& payloads_out, const Tensor& payloads_in, std::int64_t bits,
                bool symmetric, std::int64_t block, std::int64_t out_bits, bool out_symmetric,
                std::int64_t out_block, double factor, std::int64_t chunks) {
  const BlockFormat from = check_format("requantize_", bits, symmetric, block);
  const BlockFormat to = check_format("requantize_", out_bits, out_symmetric, out_block);
  const BlockReduction arguments =
      read_requantize(payloads_out, payloads_in, from, to, factor, chunks);
  std::vector<std::vector<core::PayloadSource>> each;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    each.push_back(arguments.in.every(chunk, chunks));
  }
  for_each_block_range(
      chunks, arguments.chunk_numel, to,
      [&](std::int64_t chunk, std::int64_t first, std::int64_t, std::int64_t count) {
        core::requantize_blocks(each[static_cast<std::size_t>(chunk)], first, count, from, to,
                                arguments.factor,
                                from_block(arguments.out.target(chunk), to, first));
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "quantize_(Tensor(a!) payloads, Tensor values, int bits, bool symmetric, int block, "
      "int chunks, int[] order) -> ()");
  library.def(
      "dequantize_(Tensor(a!) out, Tensor payloads, int bits, bool symmetric, int block, "
      "int chunks) -> ()");
  library.def(
      "sum_quantized_(Tensor(a!) out, Tensor payloads, int bits, bool symmetric, int block, "
      "float factor, bool accumulate) -> ()");
  library.def(
      "requantize_(Tensor(a!) payloads_out, Tensor payloads_in, int bits, bool symmetric, "
      "int block, int out_bits, bool out_symmetric, int out_block, float factor, int chunks) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("quantize_", TORCH_BOX(&quantize));
  library.impl("dequantize_", TORCH_BOX(&dequantize));
  library.impl("sum_quantized_", TORCH_BOX(&sum_quantized));
  library.impl("requantize_", TORCH_BOX(&requantize));
}

}  // namespace zero_ext::ops
