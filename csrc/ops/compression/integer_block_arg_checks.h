// The arguments of ops on blocks of integers, checked before anything changes.
#pragma once

#include "payload_arg_checks.h"

namespace zero_ext::ops {

// Values to messages or back: slot p of the messages holds part order[p] of the values.
struct BlockConversion {
  Messages messages;
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
  Messages messages;
  std::int64_t numel;
  float factor;
};

// Messages in are [message][part].
struct BlockReduction {
  Messages out;
  Messages in;
  std::int64_t part_numel;
  float factor;
};

BlockConversion read_quantise(const Tensor& messages, const Tensor& values,
                              const core::BlockFormat& format, std::int64_t parts,
                              std::vector<std::int64_t> order);
BlockConversion read_dequantise(const Tensor& out, const Tensor& messages,
                                const core::BlockFormat& format, std::int64_t parts);
BlockSum read_sum_quantised(const Tensor& out, const Tensor& messages,
                            const core::BlockFormat& format, double factor);
BlockReduction read_requantise(const Tensor& messages_out, const Tensor& messages_in,
                               const core::BlockFormat& from, const core::BlockFormat& to,
                               double factor, std::int64_t parts);

}  // namespace zero_ext::ops
