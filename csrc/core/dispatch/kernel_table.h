// Builds one instruction set's table of kernels from the kernel templates.
#pragma once

#include "../compression/blockwise_kernel.h"
#include "../compression/integer_blocks_kernel.h"
#include "../compression/sign_kernel.h"
#include "../flat/flat_buffer_kernel.h"
#include "../norm/non_finite_kernel.h"
#include "../norm/squared_norm_kernel.h"
#include "../optimizers/adam_8bit_kernel.h"
#include "../optimizers/adam_kernel.h"
#include "../optimizers/lamb_kernel.h"
#include "../optimizers/lion_kernel.h"
#include "kernels.h"

namespace zero_ext::core {
namespace {

template <class V, class Moment, class Grad>
constexpr void fill_adam(AdamKernel (&row)[kNumericTypes + 1]) {
  row[0] = &run_adam<V, Moment, Grad, float>;
  row[1] = &run_adam<V, Moment, Grad, BFloat16>;
  row[2] = &run_adam<V, Moment, Grad, Float16>;
  row[3] = &run_adam<V, Moment, Grad, NoParam>;
}

template <class V, class Moment, class Grad>
constexpr void fill_lion(LionKernel (&row)[kNumericTypes + 1]) {
  row[0] = &run_lion<V, Moment, Grad, float>;
  row[1] = &run_lion<V, Moment, Grad, BFloat16>;
  row[2] = &run_lion<V, Moment, Grad, Float16>;
  row[3] = &run_lion<V, Moment, Grad, NoParam>;
}

template <class V, class Moment, class Grad>
constexpr void fill_lamb(Kernels& table, int moments, int grad) {
  LambKernel(&row)[kNumericTypes + 1] = table.lamb[moments][grad];
  row[0] = &run_lamb<V, Moment, Grad, float>;
  row[1] = &run_lamb<V, Moment, Grad, BFloat16>;
  row[2] = &run_lamb<V, Moment, Grad, Float16>;
  row[3] = &run_lamb<V, Moment, Grad, NoParam>;
  table.lamb_norms[moments][grad] = &LambNormLoop<V, Moment, Grad>::run;
}

template <class V, class Moment>
constexpr void fill_steps(Kernels& table, int moments) {
  fill_adam<V, Moment, float>(table.adam[moments][0]);
  fill_adam<V, Moment, BFloat16>(table.adam[moments][1]);
  fill_adam<V, Moment, Float16>(table.adam[moments][2]);
  fill_lion<V, Moment, float>(table.lion[moments][0]);
  fill_lion<V, Moment, BFloat16>(table.lion[moments][1]);
  fill_lion<V, Moment, Float16>(table.lion[moments][2]);
  fill_lamb<V, Moment, float>(table, moments, 0);
  fill_lamb<V, Moment, BFloat16>(table, moments, 1);
  fill_lamb<V, Moment, Float16>(table, moments, 2);
}

template <class V, class Grad>
constexpr void fill_adam_8bit(Adam8BitKernel (&row)[kNumericTypes + 1]) {
  row[0] = &Adam8BitBlock<V, Grad, float>::run;
  row[1] = &Adam8BitBlock<V, Grad, BFloat16>::run;
  row[2] = &Adam8BitBlock<V, Grad, Float16>::run;
  row[3] = &Adam8BitBlock<V, Grad, NoParam>::run;
}

template <class V>
constexpr void fill_blockwise(Kernels& table) {
  fill_adam_8bit<V, float>(table.adam_8bit[0]);
  fill_adam_8bit<V, BFloat16>(table.adam_8bit[1]);
  fill_adam_8bit<V, Float16>(table.adam_8bit[2]);
  table.quantize_blockwise[0] = &BlockCodec<V, SignedDynamicCode>::quantize;
  table.quantize_blockwise[1] = &BlockCodec<V, UnsignedDynamicCode>::quantize;
  table.dequantize_blockwise[0] = &BlockCodec<V, SignedDynamicCode>::dequantize;
  table.dequantize_blockwise[1] = &BlockCodec<V, UnsignedDynamicCode>::dequantize;
}

template <class V, class Target>
constexpr void fill_flat(Kernels& table, int target) {
  table.copy[target][0] = &copy_range<V, Target, float>;
  table.copy[target][1] = &copy_range<V, Target, BFloat16>;
  table.copy[target][2] = &copy_range<V, Target, Float16>;
  table.accumulate[target][0] = &accumulate_range<V, Target, float>;
  table.accumulate[target][1] = &accumulate_range<V, Target, BFloat16>;
  table.accumulate[target][2] = &accumulate_range<V, Target, Float16>;
  table.sum_shards[target][0] = &sum_range<V, Target, float>;
  table.sum_shards[target][1] = &sum_range<V, Target, BFloat16>;
  table.sum_shards[target][2] = &sum_range<V, Target, Float16>;
}

template <class V>
constexpr void fill_1bit(Kernels& table) {
  table.compress_1bit[0] = &run_compress_1bit<V, float>;
  table.compress_1bit[1] = &run_compress_1bit<V, BFloat16>;
  table.compress_1bit[2] = &run_compress_1bit<V, Float16>;
  table.decompress_1bit[0] = &run_decompress_1bit<V, float>;
  table.decompress_1bit[1] = &run_decompress_1bit<V, BFloat16>;
  table.decompress_1bit[2] = &run_decompress_1bit<V, Float16>;
  table.sum_1bit = &run_sum_1bit<V>;
  table.reduce_1bit = &run_reduce_1bit<V>;
}

template <class V, class Code>
constexpr void fill_integer_blocks(Kernels& table, int format) {
  using Blocks = IntegerBlocks<V, Code>;
  table.quantize_blocks[format][0] = &Blocks::template quantize<float>;
  table.quantize_blocks[format][1] = &Blocks::template quantize<BFloat16>;
  table.quantize_blocks[format][2] = &Blocks::template quantize<Float16>;
  table.dequantize_blocks[format][0] = &Blocks::template dequantize<float>;
  table.dequantize_blocks[format][1] = &Blocks::template dequantize<BFloat16>;
  table.dequantize_blocks[format][2] = &Blocks::template dequantize<Float16>;
  table.sum_quantized[format] = &Blocks::sum;
  table.requantize_blocks[format][0] = &Blocks::template requantize<IntegerCode<4, false>>;
  table.requantize_blocks[format][1] = &Blocks::template requantize<IntegerCode<4, true>>;
  table.requantize_blocks[format][2] = &Blocks::template requantize<IntegerCode<8, false>>;
  table.requantize_blocks[format][3] = &Blocks::template requantize<IntegerCode<8, true>>;
}

template <class V>
constexpr Kernels make_kernels() {
  Kernels table{};
  fill_steps<V, float>(table, 0);
  fill_steps<V, BFloat16>(table, 1);
  fill_blockwise<V>(table);
  fill_flat<V, float>(table, 0);
  fill_flat<V, BFloat16>(table, 1);
  fill_flat<V, Float16>(table, 2);
  fill_1bit<V>(table);
  fill_integer_blocks<V, IntegerCode<4, false>>(table, 0);
  fill_integer_blocks<V, IntegerCode<4, true>>(table, 1);
  fill_integer_blocks<V, IntegerCode<8, false>>(table, 2);
  fill_integer_blocks<V, IntegerCode<8, true>>(table, 3);
  table.squared_norm[0] = &SquaredNorm<V, float>::run;
  table.squared_norm[1] = &SquaredNorm<V, BFloat16>::run;
  table.squared_norm[2] = &SquaredNorm<V, Float16>::run;
  table.all_finite[0] = &all_finite<V, float>;
  table.all_finite[1] = &all_finite<V, BFloat16>;
  table.all_finite[2] = &all_finite<V, Float16>;
  return table;
}

}  // namespace
}  // namespace zero_ext::core
