// zero_ext::compress_signs_, expand_signs_, sum_signs_ and reduce_signs_: one bit an element.
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

void compress_signs(const Tensor& payloads, const Tensor& errors, const Tensor& values,
                    double factor, std::int64_t chunks) {
  const SignCompression arguments = read_compress_signs(payloads, errors, values, factor, chunks);
  for_each_sign_block_range(
      chunks, arguments.chunk_numel,
      [&](std::int64_t chunk, std::int64_t block, std::int64_t begin, std::int64_t count) {
        const std::int64_t at = chunk * arguments.chunk_numel + begin;
        core::compress_signs(arguments.values + at * core::element_size(arguments.type),
                             arguments.type, arguments.factor, count, arguments.errors + at,
                             from_sign_block(arguments.payloads.target(chunk), block));
      });
}

void expand_signs(const Tensor& out, const Tensor& payloads, double factor, bool accumulate,
                  std::int64_t chunks) {
  const SignExpansion arguments = read_expand_signs(out, payloads, factor, chunks);
  for_each_sign_block_range(
      chunks, arguments.chunk_numel,
      [&](std::int64_t chunk, std::int64_t block, std::int64_t begin, std::int64_t count) {
        const std::int64_t at = chunk * arguments.chunk_numel + begin;
        core::expand_signs(from_sign_block(arguments.payloads.source(chunk), block), count,
                           arguments.factor, accumulate,
                           arguments.out + at * core::element_size(arguments.type), arguments.type);
      });
}

void sum_signs(const Tensor& out, const Tensor& payloads, double factor, bool accumulate) {
  const SignSumArguments arguments = read_sum_signs(out, payloads, factor);
  const std::vector<core::PayloadSource> each = arguments.payloads.every(0, 1);
  for_each_sign_block_range(
      1, arguments.numel,
      [&](std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::sum_signs(each, block, count, arguments.factor, accumulate, arguments.out + begin);
      });
}

void reduce_signs(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                  double factor) {
  const SignReduction arguments = read_reduce_signs(payload, error, payloads, factor);
  const std::vector<core::PayloadSource> each = arguments.payloads.every(0, 1);
  for_each_sign_block_range(
      1, arguments.numel,
      [&](std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::reduce_signs(each, block, count, arguments.factor, arguments.error + begin,
                           from_sign_block(arguments.payload.target(0), block));
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "compress_signs_(Tensor(a!) messages, Tensor(b!) errors, Tensor values, float factor, "
      "int parts) -> ()");
  library.def(
      "expand_signs_(Tensor(a!) out, Tensor messages, float factor, bool accumulate, int parts) "
      "-> ()");
  library.def("sum_signs_(Tensor(a!) out, Tensor messages, float factor, bool accumulate) -> ()");
  library.def(
      "reduce_signs_(Tensor(a!) message, Tensor(b!) error, Tensor messages, float factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("compress_signs_", TORCH_BOX(&compress_signs));
  library.impl("expand_signs_", TORCH_BOX(&expand_signs));
  library.impl("sum_signs_", TORCH_BOX(&sum_signs));
  library.impl("reduce_signs_", TORCH_BOX(&reduce_signs));
}

}  // namespace zero_ext::ops
