#include "sign_compression.h"

#include "../dispatch/kernels.h"

namespace zero_ext::core {

void compress_1bit(const void* values, NumericType type, float factor, std::int64_t count,
                   float* error, PayloadTarget payload) {
  active_kernels().compress_1bit[static_cast<int>(type)](values, factor, count, error, payload);
}

void decompress_1bit(PayloadSource payload, std::int64_t count, float factor, bool accumulate,
                     void* out, NumericType type) {
  active_kernels().decompress_1bit[static_cast<int>(type)](payload, count, factor, accumulate, out);
}

void sum_1bit(std::span<const PayloadSource> payloads, std::int64_t first_block, std::int64_t count,
              float factor, bool accumulate, float* out) {
  active_kernels().sum_1bit(payloads, first_block, count, factor, accumulate, out);
}

void reduce_1bit(std::span<const PayloadSource> payloads, std::int64_t first_block,
                 std::int64_t count, float factor, float* error, PayloadTarget payload) {
  active_kernels().reduce_1bit(payloads, first_block, factor, count, error, payload);
}

}  // namespace zero_ext::core
