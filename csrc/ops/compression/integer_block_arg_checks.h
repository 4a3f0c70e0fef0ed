// The arguments of ops on blocks of integers, checked before anything changes.
#pragma once

#include "payload_arg_checks.h"

namespace zero_ext::ops {

// Values to payloads or back: slot p of the payloads holds part order[p] of the values.
struct BlockConversion {
  Payloads payloads;
  std::byte* values;
  core::NumericType type;
  std::int64_t part_numel;
  std::vector<std::int64_t> order;

  std::byte* at(std::int64_t part, std::int64_t element) const {
    return values + (part * part_numel + element) * core::element_size(type);
  }
};

struct BlockSum {
  float* out;
  Payloads payloads;
  std::int64_t numel;
  float factor;
};

// Payloads in are [payload][part].
struct BlockReduction {
  Payloads out;
  Payloads in;
  std::int64_t part_numel;
  float factor;
};

BlockConversion read_quantize(const Tensor& payloads, const Tensor& values,
                              const core::BlockFormat& format, std::int64_t parts,
                              std::vector<std::int64_t> order);
BlockConversion read_dequantize(const Tensor& out, const Tensor& payloads,
                                const core::BlockFormat& format, std::int64_t parts);
BlockSum read_sum_quantized(const Tensor& out, const Tensor& payloads,
                            const core::BlockFormat& format, double factor);
BlockReduction read_requantize(const Tensor& payloads_out, const Tensor& payloads_in,
                               const core::BlockFormat& from, const core::BlockFormat& to,
                               double factor, std::int64_t parts);

}  // namespace zero_ext::ops
