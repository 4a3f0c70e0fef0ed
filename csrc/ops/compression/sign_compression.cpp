// zero_ext::compress_1bit_, decompress_1bit_, sum_1bit_ and reduce_1bit_: one bit an element.
#include "../../core/compression/sign_compression.h"

#include "../op_registration.h"
#include "block_ranges.h"
#include "payload_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrainBlocks = 4;
constexpr std::int64_t kBlockWords = core::kSignBlock / 32;

template <class Work>
void for_each_sign_block_range(std::int64_t chunks, std::int64_t numel, const Work& work) {
  for_each_block_range(chunks, numel, core::kSignBlock, kGrainBlocks, work);
}

void compress_1bit(const Tensor& payloads, const Tensor& errors, const Tensor& values,
                   double factor, std::int64_t chunks) {
  const PayloadConversion of = read_compress_1bit(payloads, errors, values, factor, chunks);
  for_each_sign_block_range(
      chunks, of.chunk_numel,
      [&](std::int64_t chunk, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::compress_1bit(of.at(chunk, begin), of.type, of.factor, count,
                            of.errors + chunk * of.chunk_numel + begin,
                            of.payloads.target(chunk, block * kBlockWords, block));
      });
}

void decompress_1bit(const Tensor& out, const Tensor& payloads, double factor, bool accumulate,
                     std::int64_t chunks) {
  const PayloadConversion of = read_decompress_1bit(out, payloads, factor, chunks);
  for_each_sign_block_range(
      chunks, of.chunk_numel,
      [&](std::int64_t chunk, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::decompress_1bit(of.payloads.source(chunk, block * kBlockWords, block), count,
                              of.factor, accumulate, of.at(chunk, begin), of.type);
      });
}

void sum_1bit(const Tensor& out, const Tensor& payloads, double factor, bool accumulate) {
  const PayloadSum of = read_sum_1bit(out, payloads, factor);
  const std::vector<core::PayloadSource> each = of.payloads.every(0, 1);
  for_each_sign_block_range(
      1, of.numel, [&](std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::sum_1bit(each, block, count, of.factor, accumulate, of.out + begin);
      });
}

void reduce_1bit(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                 double factor) {
  const PayloadReduction of = read_reduce_1bit(payload, error, payloads, factor);
  const std::vector<core::PayloadSource> each = of.in.every(0, 1);
  for_each_sign_block_range(
      1, of.chunk_numel,
      [&](std::int64_t, std::int64_t block, std::int64_t begin, std::int64_t count) {
        core::reduce_1bit(each, block, count, of.factor, of.error + begin,
                          of.out.target(0, block * kBlockWords, block));
      });
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("compress_1bit_(Tensor(a!) payloads, Tensor(b!) errors, Tensor values, float factor, int "
      "chunks) -> ()",
      TORCH_BOX(&compress_1bit));
  ops("decompress_1bit_(Tensor(a!) out, Tensor payloads, float factor, bool accumulate, int "
      "chunks) -> ()",
      TORCH_BOX(&decompress_1bit));
  ops("sum_1bit_(Tensor(a!) out, Tensor payloads, float factor, bool accumulate) -> ()",
      TORCH_BOX(&sum_1bit));
  ops("reduce_1bit_(Tensor(a!) payload, Tensor(b!) error, Tensor payloads, float factor) -> ()",
      TORCH_BOX(&reduce_1bit));
}

}  // namespace zero_ext::ops
