// The inputs of block-sparse attention, as the kernels of every device take them.
#pragma once

#include <cstdint>

#include "../base/numeric_types.h"
#include "../base/rounding.h"

namespace zero_ext::core {

inline constexpr std::int64_t kMinHeadDim = 16;
inline constexpr std::int64_t kMaxHeadDim = 256;
inline constexpr std::int64_t kHeadDimStep = 8;

// Elements [batch, head, row, head dim] with stride 1 in the last dimension; strides in elements.
struct RowsView {
  const void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
};

// Added to scores. A stride is 0 where the bias has one entry for all.
struct BiasView {
  const void* data = nullptr;  // null without bias
  NumericType type = NumericType::float32;
  std::int64_t sizes[4] = {};    // batch, heads, queries, keys: 1 or all
  std::int64_t strides[4] = {};  // in elements
};

// Blocks in compressed rows: row r of layout head h has the column blocks
// columns[pointers[h * (row_blocks + 1) + r] .. pointers[h * (row_blocks + 1) + r + 1]), ascending.
struct BlockRows {
  const std::int32_t* pointers = nullptr;
  const std::int32_t* columns = nullptr;
  std::int64_t heads = 0;  // 1, or one for each query head
  std::int64_t row_blocks = 0;
  std::int64_t block = 0;  // tokens of a block: 16, 32, 64 or 128
};

struct AttentionArgs {
  NumericType type = NumericType::float32;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t key_heads = 0;  // divides heads; query head h reads key head h / (heads / key_heads)
  std::int64_t query_length = 0;
  std::int64_t key_length = 0;
  std::int64_t head_dim = 0;
  RowsView query;
  RowsView key;
  RowsView value;
  BlockRows layout;
  const bool* key_padding = nullptr;  // [batch, key length], true where a key may be seen; or null
  std::int64_t key_padding_stride = 0;
  BiasView bias;
  float scale = 0;
  bool causal = false;
  double dropout = 0;  // probability that a weight is dropped
  std::uint64_t seed = 0;
  std::uint32_t offset = 0;

  std::int64_t group() const { return heads / key_heads; }
  std::int64_t column_blocks() const { return ceil_div(key_length, layout.block); }
};

struct AttentionResult {
  void* output = nullptr;      // [batch, heads, query length, head dim], of the problem's type
  float* logsumexp = nullptr;  // [batch, heads, query length], in base 2
};

struct AttentionGradArgs {
  RowsView grad_output;
  RowsView output;
  const float* logsumexp = nullptr;  // [batch, heads, query length], in base 2
  void* query = nullptr;             // contiguous, of the problem's type
  void* key = nullptr;
  void* value = nullptr;
  float* bias = nullptr;  // contiguous, of the bias's sizes; null if not asked for
};

}  // namespace zero_ext::core
