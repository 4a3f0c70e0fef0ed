// The table of kernels that each instruction set provides.
#pragma once

#include <cstdint>
#include <span>

#include "../base/numeric_types.h"
#include "../compression/blockwise.h"
#include "../compression/dynamic_code.h"
#include "../compression/payload_layout.h"
#include "../norm/superaccumulator.h"
#include "../optimizers/adam.h"
#include "../optimizers/adam_8bit.h"
#include "../optimizers/lamb.h"
#include "../optimizers/lion.h"

namespace zero_ext::core {

using AdamKernel = void (*)(const AdamBuffers&, const AdamCoefficients&, std::int64_t,
                            std::int64_t);
using LionKernel = void (*)(const LionBuffers&, const LionCoefficients&, std::int64_t,
                            std::int64_t);
using LambKernel = void (*)(const LambBuffers&, const LambCoefficients&, std::int64_t,
                            std::int64_t);
using LambNormsKernel = void (*)(const LambBuffers&, const LambCoefficients&, std::int64_t,
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

// Indices are NumericType values in the order named; param's last index means "no param".
struct Kernels {
  AdamKernel adam[2][kNumericTypes][kNumericTypes + 1];        // [moments][grad][param]
  LionKernel lion[2][kNumericTypes][kNumericTypes + 1];        // [moments][grad][param]
  LambKernel lamb[2][kNumericTypes][kNumericTypes + 1];        // [moments][grad][param]
  LambNormsKernel lamb_norms[2][kNumericTypes];                // [moments][grad]
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
#endif

// The kernels of active_isa().
const Kernels& active_kernels();

}  // namespace zero_ext::core
