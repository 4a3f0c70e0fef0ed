// The table of kernels with exponentials, of attention and the cross entropy, that each instruction
// set provides.
#pragma once

#include <cstdint>

#include "../loss/cross_entropy.h"
#include "attention_args.h"

namespace zero_ext::core {

// What one call of the backward kernel works through: row tiles of consecutive query heads of one
// key head, and the keys of a range. Row tiles are runs of tile_length() queries.
struct BackwardWork {
  std::int64_t batch;
  std::int64_t first_head;  // query heads
  std::int64_t end_head;
  std::int64_t first_tile;
  std::int64_t end_tile;
  std::int64_t first_key;  // a multiple of the block
  std::int64_t end_key;
  bool needs_query;
  bool needs_bias;    // adds the scores' gradients to the bias's: no other part may own the same
                      // entries
  float* key_sums;    // [end_key - first_key, padded head dim], added to; null: not wanted
  float* value_sums;  // likewise
};

// What one call of the bias kernel works through: all row tiles and keys of a range, for all
// batches and heads in ranges, whose score gradients are added up in the bias's gradient.
struct BiasWork {
  std::int64_t first_batch;
  std::int64_t end_batch;
  std::int64_t first_head;
  std::int64_t end_head;
  std::int64_t first_tile;
  std::int64_t end_tile;
  std::int64_t first_key;
  std::int64_t end_key;
};

struct AttentionKernels {
  struct OfType {
    std::int64_t (*forward_floats)(std::int64_t head_dim);
    void (*forward)(const AttentionArgs&, const AttentionResult&, std::int64_t batch,
                    std::int64_t head, std::int64_t tile, float* scratch);
    std::int64_t (*backward_floats)(std::int64_t head_dim);
    void (*backward)(const AttentionArgs&, const AttentionGradArgs&, const BackwardWork&,
                     float* scratch);
    void (*bias)(const AttentionArgs&, const AttentionGradArgs&, const BiasWork&, float* scratch);
    // Writes `rows` sums of the padded head dim, times a factor, as rows of the type.
    void (*write_rows)(const float* sums, std::int64_t rows, std::int64_t head_dim, float factor,
                       void* target);
    void (*sum_softmax)(const LogitRows&, const SoftmaxSums&, std::int64_t begin, std::int64_t end);
    void (*differentiate_softmax)(const LogitRows&, const SoftmaxGradient&, std::int64_t begin,
                                  std::int64_t end);
  };
  OfType of_type[kNumericTypes];
};

extern const AttentionKernels kScalarAttention;
#if defined(__x86_64__)
extern const AttentionKernels kAvx2Attention;
extern const AttentionKernels kAvx512Attention;
extern const AttentionKernels kAvx512BFloat16Attention;
#elif defined(__aarch64__)
extern const AttentionKernels kNeonAttention;
#endif

// The kernels of active_isa().
const AttentionKernels& active_attention();

}  // namespace zero_ext::core
