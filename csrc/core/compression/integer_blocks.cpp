#include "integer_blocks.h"

#include <algorithm>

#include "../dispatch/kernels.h"

namespace zero_ext::core {
namespace {

int index_of(const BlockFormat& format) {
  return 2 * (format.bits == 8 ? 1 : 0) + (format.is_symmetric ? 1 : 0);
}

}  // namespace

void quantize_blocks(const void* values, NumericType type, std::int64_t count,
                     const BlockFormat& format, PayloadTarget payload) {
  active_kernels().quantize_blocks[index_of(format)][static_cast<int>(type)](values, count,
                                                                             format.block, payload);
}

void dequantize_blocks(PayloadSource payload, std::int64_t count, const BlockFormat& format,
                       void* out, NumericType type) {
  active_kernels().dequantize_blocks[index_of(format)][static_cast<int>(type)](payload, count,
                                                                               format.block, out);
}

void sum_quantized(std::span<const PayloadSource> payloads, std::int64_t first_block,
                   std::int64_t count, const BlockFormat& format, float factor, bool accumulate,
                   float* out) {
  active_kernels().sum_quantized[index_of(format)](payloads, first_block, count, format.block,
                                                   factor, accumulate, out);
}

void requantize_blocks(std::span<const PayloadSource> payloads, std::int64_t first_block,
                       std::int64_t count, const BlockFormat& from, const BlockFormat& to,
                       float factor, PayloadTarget payload) {
  active_kernels().requantize_blocks[index_of(from)][index_of(to)](payloads, first_block, count,
                                                                   to.block, factor, payload);
}

}  // namespace zero_ext::core
