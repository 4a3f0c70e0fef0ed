// The table of kernels that each instruction set provides.
#pragma once

#include <cstdint>
#include <span>

#include "../base/numeric_types.h"
#include "../compression/blockwise.h"
#include "../compression/dynamic_code.h"
#include "../compression/payload_layout.h"
#include "../norm/superaccumulator.h"
#include "../optimizers/adam_8bit.h"
#include "../optimizers/lamb_norms.h"
#include "../optimizers/optimizer_list.h"

namespace zero_ext::core {

template <class Rule>
using StepKernel = void (*)(const StepBuffers&, const CoefficientsOf<Rule>&, std::int64_t,
                            std::int64_t);
using LambNormsKernel = void (*)(const StepBuffers&, const CoefficientsOf<LambRule>&, std::int64_t,
                                 std::int64_t, LambNorms&);
using Adam8BitKernel = void (*)(const Adam8BitBuffers&, std::span<const AdamSegment>, std::int64_t,
                                std::int64_t);
using QuantizeKernel = void (*)(const float*, std::int64_t, std::uint8_t*, float*);
using DequantizeKernel = void (*)(const std::uint8_t*, const float*, std::int64_t, float*);
using ConvertKernel = void (*)(void*, const void*, std::int64_t);
using SquaredNormKernel = void (*)(const void*, std::int64_t, Superaccumulator&);
using AllFiniteKernel = bool (*)(const void*, std::int64_t);
using SumKernel = void (*)(void*, std::span<const void* const>, std::int64_t, std::int64_t, float,
                           bool);
using Compress1bitKernel = void (*)(const void*, float, std::int64_t, float*, PayloadTarget);
using Decompress1bitKernel = void (*)(PayloadSource, std::int64_t, float, bool, void*);
using Sum1bitKernel = void (*)(std::span<const PayloadSource>, std::int64_t, std::int64_t, float,
                               bool, float*);
using Reduce1bitKernel = void (*)(std::span<const PayloadSource>, std::int64_t, float, std::int64_t,
                                  float*, PayloadTarget);
using QuantizeBlocksKernel = void (*)(const void*, std::int64_t, std::int64_t, PayloadTarget);
using DequantizeBlocksKernel = void (*)(PayloadSource, std::int64_t, std::int64_t, void*);
using SumQuantizedKernel = void (*)(std::span<const PayloadSource>, std::int64_t, std::int64_t,
                                    std::int64_t, float, bool, float*);
using RequantizeBlocksKernel = void (*)(std::span<const PayloadSource>, std::int64_t, std::int64_t,
                                        std::int64_t, float, PayloadTarget);

// Formats of integer blocks: 4 bits asymmetric and symmetric, 8 bits asymmetric and symmetric.
inline constexpr int kBlockFormats = 4;

// Moments are float32 or bfloat16.
inline constexpr int kMomentTypes = 2;

template <class Rule>
struct StepKernels {
  StepKernel<Rule> at[kMomentTypes][kNumericTypes][kNumericTypes + 1];  // [moments][grad][param]
};

template <class List>
struct KernelsOfRules;
template <class... Rules>
struct KernelsOfRules<RuleList<Rules...>> : StepKernels<Rules>... {};

// Indices are NumericType values in the order named; param's last index means "no param".
struct Kernels {
  KernelsOfRules<OptimizerRules> steps;
  LambNormsKernel lamb_norms[kMomentTypes][kNumericTypes];     // [moments][grad]
  Adam8BitKernel adam_8bit[kNumericTypes][kNumericTypes + 1];  // [grad][param]
  QuantizeKernel quantize_blockwise[kDynamicCodes];
  DequantizeKernel dequantize_blockwise[kDynamicCodes];
  ConvertKernel copy[kNumericTypes][kNumericTypes];        // [target][source]
  ConvertKernel accumulate[kNumericTypes][kNumericTypes];  // [target][source]
  SumKernel sum_shards[kNumericTypes][kNumericTypes];      // [target][source]
  SquaredNormKernel squared_norm[kNumericTypes];
  AllFiniteKernel all_finite[kNumericTypes];
  Compress1bitKernel compress_1bit[kNumericTypes];
  Decompress1bitKernel decompress_1bit[kNumericTypes];
  Sum1bitKernel sum_1bit;
  Reduce1bitKernel reduce_1bit;
  QuantizeBlocksKernel quantize_blocks[kBlockFormats][kNumericTypes];
  DequantizeBlocksKernel dequantize_blocks[kBlockFormats][kNumericTypes];
  SumQuantizedKernel sum_quantized[kBlockFormats];
  RequantizeBlocksKernel requantize_blocks[kBlockFormats][kBlockFormats];  // [from][to]
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

// The kernels of active_isa().
const Kernels& active_kernels();

}  // namespace zero_ext::core
