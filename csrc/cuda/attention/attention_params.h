// Arguments of the attention kernels: tensors by address and strides, sizes, and the layout.
#pragma once

#include <cstdint>

#include "../../core/base/host_device.h"
#include "../../core/base/numeric_types.h"

namespace zero_ext::cuda {

// Elements [batch, heads, rows, head dim], the last ones next to each other.
template <class T>
struct Heads {
  T* data;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t row_stride;

  ZERO_EXT_FUNCTION T* of(std::int32_t batch, std::int32_t head) const {
    return data + batch * batch_stride + head * head_stride;
  }
};

// Elements of one batch and head.
template <class T>
struct Matrix {
  T* data;
  std::int64_t row_stride;
  std::int32_t rows;
  std::int32_t dim;
};

// Lengths, and batch times heads, are at most 2^30.
struct AttentionSizes {
  std::int32_t batch;
  std::int32_t query_heads;
  std::int32_t key_heads;  // divides query_heads: neighboring query heads share
                           // a key head
  std::int32_t query_length;
  std::int32_t key_length;
  std::int32_t dim;

  ZERO_EXT_FUNCTION std::int64_t query_rows() const {
    return std::int64_t{batch} * query_heads * query_length;
  }
  ZERO_EXT_FUNCTION std::int64_t key_rows() const {
    return std::int64_t{batch} * key_heads * key_length;
  }
};

// An additive bias; strides of dimensions along which it is repeated are 0.
struct AttentionBias {
  const void* data;  // null: none
  core::NumericType type;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t query_stride;
  std::int64_t key_stride;
};

// Its gradient, float32 [of bias]; strides as those of the bias, but of a contiguous tensor.
struct BiasGradient {
  float* data;  // null: not asked for
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t query_stride;
  std::int64_t key_stride;
};

}  // namespace zero_ext::cuda
