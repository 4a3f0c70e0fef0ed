#include "sign_compression.h"

#include "../simd/kernels.h"

namespace zero_ext::core {

void compress_signs(const void* values, NumericType type, float factor, std::int64_t count,
                    float* error, MessageTarget message) {
  active_kernels().compress_signs[static_cast<int>(type)](values, factor, count, error, message);
}

void expand_signs(MessageSource message, std::int64_t count, float factor, bool accumulate,
                  void* out, NumericType type) {
  active_kernels().expand_signs[static_cast<int>(type)](message, count, factor, accumulate, out);
}

void sum_signs(std::span<const MessageSource> messages, std::int64_t first_block,
               std::int64_t count, float factor, bool accumulate, float* out) {
  active_kernels().sum_signs(messages, first_block, count, factor, accumulate, out);
}

void reduce_signs(std::span<const MessageSource> messages, std::int64_t first_block,
                  std::int64_t count, float factor, float* error, MessageTarget message) {
  active_kernels().reduce_signs(messages, first_block, factor, count, error, message);
}

}  // namespace zero_ext::core
