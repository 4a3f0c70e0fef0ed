// The arguments of ops on signs, checked before anything changes.
#pragma once

#include "payload_arg_checks.h"

namespace zero_ext::ops {

struct SignCompression {
  Payloads payloads;
  float* errors;
  const std::byte* values;
  core::NumericType type;
  std::int64_t chunk_numel;
  float factor;
};

struct SignExpansion {
  std::byte* out;
  core::NumericType type;
  Payloads payloads;
  std::int64_t chunk_numel;
  float factor;
};

struct SignSumArguments {
  float* out;
  Payloads payloads;
  std::int64_t numel;
  float factor;
};

struct SignReduction {
  Payloads payload;
  float* error;
  Payloads payloads;
  std::int64_t numel;
  float factor;
};

SignCompression read_compress_1bit(const Tensor& payloads, const Tensor& errors,
                                   const Tensor& values, double factor, std::int64_t chunks);
SignExpansion read_decompress_1bit(const Tensor& out, const Tensor& payloads, double factor,
                                   std::int64_t chunks);
SignSumArguments read_sum_1bit(const Tensor& out, const Tensor& payloads, double factor);
SignReduction read_reduce_1bit(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                               double factor);

}  // namespace zero_ext::ops
