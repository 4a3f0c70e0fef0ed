// The tensors of block-sparse attention, checked before anything is computed. Both modules use it.
#pragma once

#include <optional>

#include "../../core/attention/attention_args.h"
#include "../checks.h"

namespace zero_ext::ops {

// As the ops take them, in the order of their schemas.
struct AttentionTensors {
  const Tensor& query;                // [batch, query heads, query length, head dim]
  const Tensor& key;                  // [batch, key heads, key length, head dim]
  const Tensor& value;                // as key
  const Tensor& row_pointers;         // int32 [layout heads, row blocks + 1]
  const Tensor& columns;              // int32 [total blocks]
  const OptionalTensor& key_padding;  // bool [batch, key length]
  const OptionalTensor& bias;         // [batch|1, query heads|1, query length|1, key length|1]
};

struct AttentionOptions {
  std::int64_t block;
  bool causal;
  double scale;
  double dropout;
  std::int64_t seed;
  std::int64_t offset;
};

// Checks dtypes, shapes, strides and devices, not the values of the layout.
core::AttentionArgs read_attention(const char* op, const AttentionTensors& tensors,
                                   const AttentionOptions& options);

// [batch, query heads, query length, head dim] of the problem's dtype with unit last stride.
core::RowsView read_rows_like_query(const char* op, const char* name, const Tensor& tensor,
                                    const Tensor& query);

// float32 [batch, query heads, query length], contiguous.
const float* read_logsumexp(const char* op, const Tensor& logsumexp,
                            const core::AttentionArgs& args);

// The blocks of the transposed layout, for kernels that read it: both or an error.
struct TransposedBlocks {
  const std::int32_t* column_pointers;  // [layout heads, column blocks + 1]
  const std::int32_t* rows;             // [total blocks]
};
TransposedBlocks read_transposed(const char* op, const OptionalTensor& column_pointers,
                                 const OptionalTensor& rows, const core::AttentionArgs& args,
                                 std::int64_t total_blocks);

// A new contiguous tensor of the same shape, dtype and device.
Tensor contiguous_like(const Tensor& tensor);

}  // namespace zero_ext::ops
