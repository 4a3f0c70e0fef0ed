// zero_ext::compress_1bit_, decompress_1bit_, sum_1bit_ and reduce_1bit_: one bit an element.
#include "../../core/compression/sign_compression.h"

#include "sign_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrainBlocks = 4;

// Calls work(payload, block, begin, count) for runs of whole blocks of `numel` elements in each of
// `chunks`, the last block of which may be shorter.
template <class Work>
void for_each_sign_block_range(std::int64_t chunks, std::int64_t numel, const Work& work) {
  const std::int64_t blocks = core::sign_blocks(numel);
  torch::stable::parallel_for(
      0, chunks * blocks, kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
        core::for_each_chunk(
            begin, end, blocks, [&](std::int64_t chunk, std::int64_t first, std::int64_t last) {
              const std::int64_t from = first * core::kSignBlock;
              work(chunk, first, from, std::min(last * core::kSignBlock, numel) - from);
            });
      });
}

template <class Payload>
Payload from_sign_block(Payload payload, std::int64_t block) {
  return {payload.words + block * (core::kSignBlock / 32), payload.scales + block};
}

void compress_1bit(const Tensor& payloads, const Tensor& errors, const Tensor& values,
                   double factor, std::int64_t chunks) {
  const SignCompression arguments = read_compress_1bit(payloads, errors, values, factor, chunks);
  for_each_sign_block_range(
      chunks, arguments.chunk_numel,
      [&](std::int64_t chunk, std::int64_t block, std::int64_t begin, std::int64_t count) {
        const std::int64_t at = chunk * arguments.chunk_numel + begin;
        core::compress_1bit(arguments.values + at * core::element_size(arguments.type),
                            arguments.type, arguments.factor, count, arguments.errors + at,
                            from_sign_block(arguments.payloads.target(chunk), block));
      });
}

void decompress_1bit(const Tensor& out, const Tensor& payloads, double factor, bool accumulate,
                     std::int64_t chunks) {
  const SignExpansion arguments = read_decompress_1bit(out, payloads, factor, chunks);
  for_each_sign_block_range(
      chunks, arguments.chunk_numel,
      [&](std::int64_t chunk, std::int64_t block, std::int64_t begin, std::int64_t count) {
        const std::int64_t at = chunk * arguments.chunk_numel + begin;
        core::decompress_1bit(
            from_sign_block(arguments.payloads.source(chunk), block), count, arguments.factor,
            accumulate, arguments.out + at * core::element_size(arguments.type), arguments.type);
      });
}

void sum_1bit(const Tensor& out, const Tensor& payloads, double factor, bool accumulate) {
  const SignSumArguments arguments = read_sum_1bit(out, payloads, factor);
  const std::vector<core::PayloadSource> each = arguments.payloads.every(0, 1);
  for_each_sign_block_range(
      1, arguments.numel,
      [&](std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::sum_1bit(each, block, count, arguments.factor, accumulate, arguments.out + begin);
      });
}

void reduce_1bit(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                 double factor) {
  const SignReduction arguments = read_reduce_1bit(payload, error, payloads, factor);
  const std::vector<core::PayloadSource> each = arguments.payloads.every(0, 1);
  for_each_sign_block_range(
      1, arguments.numel,
      [&](std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::reduce_1bit(each, block, count, arguments.factor, arguments.error + begin,
                          from_sign_block(arguments.payload.target(0), block));
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "compress_1bit_(Tensor(a!) payloads, Tensor(b!) errors, Tensor values, float factor, "
      "int chunks) -> ()");
  library.def(
      "decompress_1bit_(Tensor(a!) out, Tensor payloads, float factor, bool accumulate, int "
      "chunks) "
      "-> ()");
  library.def("sum_1bit_(Tensor(a!) out, Tensor payloads, float factor, bool accumulate) -> ()");
  library.def(
      "reduce_1bit_(Tensor(a!) payload, Tensor(b!) error, Tensor payloads, float factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("compress_1bit_", TORCH_BOX(&compress_1bit));
  library.impl("decompress_1bit_", TORCH_BOX(&decompress_1bit));
  library.impl("sum_1bit_", TORCH_BOX(&sum_1bit));
  library.impl("reduce_1bit_", TORCH_BOX(&reduce_1bit));
}

}  // namespace zero_ext::ops
