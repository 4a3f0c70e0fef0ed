// The arguments of ops on blocks of integers, checked before anything changes.
#pragma once

#include "payload_arg_checks.h"

namespace zero_ext::ops {

// Values to payloads or back: slot p of the payloads holds chunk order[p] of the values.
struct BlockConversion {
  Payloads payloads;
  std::byte* values;
  core::NumericType type;
  std::int64_t chunk_numel;
  std::vector<std::int64_t> order;

  std::byte* at(std::int64_t chunk, std::int64_t element) const {
    return values + (chunk * chunk_numel + element) * core::element_size(type);
  }
};

struct BlockSum {
  float* out;
  Payloads payloads;
  std::int64_t numel;
  float factor;
};

// Payloads in are [payload][chunk].
struct BlockReduction {
  Payloads out;
  Payloads in;
  std::int64_t chunk_numel;
  float factor;
};

BlockConversion read_quantize(const Tensor& payloads, const Tensor& values,
                              const core::BlockFormat& format, std::int64_t chunks,
                              std::vector<std::int64_t> order);
BlockConversion read_dequantize(const Tensor& out, const Tensor& payloads,
                                const core::BlockFormat& format, std::int64_t chunks);
BlockSum read_sum_quantized(const Tensor& out, const Tensor& payloads,
                            const core::BlockFormat& format, double factor);
BlockReduction read_requantize(const Tensor& payloads_out, const Tensor& payloads_in,
                               const core::BlockFormat& from, const core::BlockFormat& to,
                               double factor, std::int64_t chunks);

}  // namespace zero_ext::ops
