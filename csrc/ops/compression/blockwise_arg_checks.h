// The tensors of quantized values, checked before anything changes.
#pragma once

#include <string>

#include "../../core/compression/blockwise.h"
#include "../checks.h"

namespace zero_ext::ops {

// Codes uint8 [n] and scales float32 [block_count(n)].
struct QuantizedTensors {
  Tensor codes;
  Tensor scales;
};

// float32 [n]; returns n.
std::int64_t check_values(const char* op, const Tensor& values);

// Returns n. Arguments are called `prefix` + "codes" and `prefix` + "scales".
std::int64_t check_quantized(const char* op, const QuantizedTensors& quantized,
                             const std::string& prefix = "");

// Uninitialized, of as many elements as `values` or `codes` and on the same device.
QuantizedTensors empty_quantized(const Tensor& values);
Tensor empty_values(const Tensor& codes);

}  // namespace zero_ext::ops
