#include "integer_blocks.h"

#include <algorithm>

#include "../simd/kernels.h"

namespace zero_ext::core {
namespace {

int index_of(const BlockFormat& format) {
  return 2 * (format.bits == 8 ? 1 : 0) + (format.is_symmetric ? 1 : 0);
}

}  // namespace

void quantize_blocks(const void* values, NumericType type, std::int64_t count,
                     const BlockFormat& format, MessageTarget message) {
  active_kernels().quantize_blocks[index_of(format)][static_cast<int>(type)](values, count,
                                                                             format.block, message);
}

void dequantize_blocks(MessageSource message, std::int64_t count, const BlockFormat& format,
                       void* out, NumericType type) {
  active_kernels().dequantize_blocks[index_of(format)][static_cast<int>(type)](message, count,
                                                                               format.block, out);
}

void sum_quantized(std::span<const MessageSource> messages, std::int64_t first_block,
                   std::int64_t count, const BlockFormat& format, float factor, bool accumulate,
                   float* out) {
  active_kernels().sum_quantized[index_of(format)](messages, first_block, count, format.block,
                                                   factor, accumulate, out);
}

void requantize_blocks(std::span<const MessageSource> messages, std::int64_t first_block,
                       std::int64_t count, const BlockFormat& from, const BlockFormat& to,
                       float factor, MessageTarget message) {
  active_kernels().requantize_blocks[index_of(from)][index_of(to)](messages, first_block, count,
                                                                   to.block, factor, message);
}

}  // namespace zero_ext::core
