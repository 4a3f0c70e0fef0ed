// Builds one instruction set's table of kernels from the kernel templates.
#pragma once

#include "../compression/blockwise_kernel.h"
#include "../compression/integer_blocks_kernel.h"
#include "../compression/sign_kernel.h"
#include "../flat/flat_buffer_kernel.h"
#include "../norm/non_finite_kernel.h"
#include "../norm/squared_norm_kernel.h"
#include "../optimizers/adam_8bit_kernel.h"
#include "../optimizers/lamb_norms_kernel.h"
#include "../optimizers/optimizer_kernel.h"
#include "../optimizers/optimizer_rules.h"
#include "kernels.h"

namespace zero_ext::core {
namespace {

// Calls visit.operator()<T>(i) for the numeric types, in the order of NumericType.
template <class Visit>
constexpr void for_each_type(const Visit& visit) {
  visit.template operator()<float>(0);
  visit.template operator()<BFloat16>(1);
  visit.template operator()<Float16>(2);
}

template <class V, class Rule, class Moment>
constexpr void fill_step(StepKernels<Rule>& table, int moments) {
  for_each_type([&]<class Grad>(int grad) {
    auto& row = table.at[moments][grad];
    for_each_type([&]<class Param>(int param) {
      row[param] = &OptimizerLoop<V, Rule, Moment, Grad, Param>::step;
    });
    row[kNumericTypes] = &OptimizerLoop<V, Rule, Moment, Grad, NoParam>::step;
  });
}

template <class V>
constexpr void fill_optimizers(Kernels& table) {
  OptimizerRules::visit([&]<class Rule>() {
    fill_step<V, Rule, float>(table.steps, 0);
    fill_step<V, Rule, BFloat16>(table.steps, 1);
  });
  for_each_type([&]<class Grad>(int grad) {
    table.lamb_norms[0][grad] = &LambNormLoop<V, float, Grad>::run;
    table.lamb_norms[1][grad] = &LambNormLoop<V, BFloat16, Grad>::run;
    for_each_type([&]<class Param>(int param) {
      table.adam_8bit[grad][param] = &Adam8BitBlock<V, Grad, Param>::run;
    });
    table.adam_8bit[grad][kNumericTypes] = &Adam8BitBlock<V, Grad, NoParam>::run;
  });
}

template <class V>
constexpr void fill_compression(Kernels& table) {
  table.quantize_blockwise[0] = &BlockCodec<V, SignedDynamicCode>::quantize;
  table.quantize_blockwise[1] = &BlockCodec<V, UnsignedDynamicCode>::quantize;
  table.dequantize_blockwise[0] = &BlockCodec<V, SignedDynamicCode>::dequantize;
  table.dequantize_blockwise[1] = &BlockCodec<V, UnsignedDynamicCode>::dequantize;
  for_each_type([&]<class T>(int i) {
    table.compress_1bit[i] = &run_compress_1bit<V, T>;
    table.decompress_1bit[i] = &run_decompress_1bit<V, T>;
  });
  table.sum_1bit = &run_sum_1bit<V>;
  table.reduce_1bit = &run_reduce_1bit<V>;
}

// Calls visit.operator()<Code>(i) for the formats of integer blocks.
template <class Visit>
constexpr void for_each_block_format(const Visit& visit) {
  visit.template operator()<IntegerCode<4, false>>(0);
  visit.template operator()<IntegerCode<4, true>>(1);
  visit.template operator()<IntegerCode<8, false>>(2);
  visit.template operator()<IntegerCode<8, true>>(3);
}

template <class V>
constexpr void fill_integer_blocks(Kernels& table) {
  for_each_block_format([&]<class Code>(int format) {
    using Blocks = IntegerBlocks<V, Code>;
    for_each_type([&]<class T>(int i) {
      table.quantize_blocks[format][i] = &Blocks::template quantize<T>;
      table.dequantize_blocks[format][i] = &Blocks::template dequantize<T>;
    });
    table.sum_quantized[format] = &Blocks::sum;
    for_each_block_format([&]<class To>(int to) {
      table.requantize_blocks[format][to] = &Blocks::template requantize<To>;
    });
  });
}

template <class V>
constexpr void fill_flat(Kernels& table) {
  for_each_type([&]<class T>(int i) {
    for_each_type([&]<class Source>(int source) {
      table.copy[i][source] = &copy_range<V, T, Source>;
      table.accumulate[i][source] = &accumulate_range<V, T, Source>;
      table.sum_shards[i][source] = &sum_range<V, T, Source>;
    });
    table.squared_norm[i] = &SquaredNorm<V, T>::run;
    table.all_finite[i] = &all_finite<V, T>;
  });
}

template <class V>
constexpr Kernels make_kernels() {
  Kernels table{};
  fill_optimizers<V>(table);
  fill_compression<V>(table);
  fill_integer_blocks<V>(table);
  fill_flat<V>(table);
  return table;
}

}  // namespace
}  // namespace zero_ext::core
