// The arguments of ops on signs, checked before anything changes.
#pragma once

#include "payload_arg_checks.h"

namespace zero_ext::ops {

struct SignCompression {
  Messages messages;
  float* errors;
  const std::byte* values;
  core::NumericType type;
  std::int64_t part_numel;
  float factor;
};

struct SignExpansion {
  std::byte* out;
  core::NumericType type;
  Messages messages;
  std::int64_t part_numel;
  float factor;
};

struct SignSumArguments {
  float* out;
  Messages messages;
  std::int64_t numel;
  float factor;
};

struct SignReduction {
  Messages message;
  float* error;
  Messages messages;
  std::int64_t numel;
  float factor;
};

SignCompression read_compress_signs(const Tensor& messages, const Tensor& errors,
                                    const Tensor& values, double factor, std::int64_t parts);
SignExpansion read_expand_signs(const Tensor& out, const Tensor& messages, double factor,
                                std::int64_t parts);
SignSumArguments read_sum_signs(const Tensor& out, const Tensor& messages, double factor);
SignReduction read_reduce_signs(const Tensor& message, const Tensor& error, const Tensor& messages,
                                double factor);

}  // namespace zero_ext::ops
