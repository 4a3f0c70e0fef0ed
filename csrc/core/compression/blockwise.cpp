#include "blockwise.h"

#include "../dispatch/kernels.h"

namespace zero_ext::core {

void quantize_blockwise(const float* values, std::int64_t count, DynamicCode code,
                        std::uint8_t* codes, float* scales) {
  active_kernels().quantize_blockwise[static_cast<int>(code)](values, count, codes, scales);
}

void dequantize_blockwise(const std::uint8_t* codes, const float* scales, std::int64_t count,
                          DynamicCode code, float* values) {
  active_kernels().dequantize_blockwise[static_cast<int>(code)](codes, scales, count, values);
}

}  // namespace zero_ext::core
