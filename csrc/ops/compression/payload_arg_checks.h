// The tensors of compressed payloads, checked before anything changes.
#pragma once

#include <vector>

#include "../../core/compression/payload_layout.h"
#include "../checks.h"

namespace zero_ext::ops {

// Payloads of `bytes` each, one after another.
struct Payloads {
  std::byte* data;
  std::int64_t count;
  std::int64_t bytes;
  std::int64_t words;  // of codes, in each

  // A payload from words and scales on that it has so many before.
  core::PayloadTarget target(std::int64_t payload, std::int64_t words_before = 0,
                             std::int64_t scales_before = 0) const {
    auto* start = reinterpret_cast<std::uint32_t*>(data + payload * bytes);
    return {start + words_before, reinterpret_cast<float*>(start + words) + scales_before};
  }
  core::PayloadSource source(std::int64_t payload, std::int64_t words_before = 0,
                             std::int64_t scales_before = 0) const {
    const core::PayloadTarget found = target(payload, words_before, scales_before);
    return {found.words, found.scales};
  }
  // Payload `first` and each `step` further on.
  std::vector<core::PayloadSource> every(std::int64_t first, std::int64_t step) const {
    std::vector<core::PayloadSource> result;
    for (std::int64_t i = first; i < count; i += step) result.push_back(source(i));
    return result;
  }
};

// Values to payloads or back: slot p of the payloads holds a chunk of the values, number p or,
// where there is an order, number order[p].
struct PayloadConversion {
  Payloads payloads;
  std::byte* values;
  core::NumericType type;
  std::int64_t chunk_numel;
  std::vector<std::int64_t> order = {};
  float* errors = nullptr;  // as many as values
  float factor = 1;

  std::byte* at(std::int64_t chunk, std::int64_t element) const {
    return values + (chunk * chunk_numel + element) * core::element_size(type);
  }
};

struct PayloadSum {
  float* out;
  Payloads payloads;
  std::int64_t numel;
  float factor;
};

// Payloads in are [payload][chunk].
struct PayloadReduction {
  Payloads out;
  Payloads in;
  std::int64_t chunk_numel;
  float factor;
  float* error = nullptr;
};

core::BlockFormat check_format(const char* op, std::int64_t bits, bool symmetric,
                               std::int64_t block);

// Payloads are uint8, flat, aligned to 4 bytes and a whole number of them. No two tensors of an op
// share memory.
PayloadConversion read_quantize(const Tensor& payloads, const Tensor& values,
                                const core::BlockFormat& format, std::int64_t chunks,
                                std::vector<std::int64_t> order);
PayloadConversion read_dequantize(const Tensor& out, const Tensor& payloads,
                                  const core::BlockFormat& format, std::int64_t chunks);
PayloadSum read_sum_quantized(const Tensor& out, const Tensor& payloads,
                              const core::BlockFormat& format, double factor);
PayloadReduction read_requantize(const Tensor& payloads_out, const Tensor& payloads_in,
                                 const core::BlockFormat& from, const core::BlockFormat& to,
                                 double factor, std::int64_t chunks);

PayloadConversion read_compress_1bit(const Tensor& payloads, const Tensor& errors,
                                     const Tensor& values, double factor, std::int64_t chunks);
PayloadConversion read_decompress_1bit(const Tensor& out, const Tensor& payloads, double factor,
                                       std::int64_t chunks);
PayloadSum read_sum_1bit(const Tensor& out, const Tensor& payloads, double factor);
PayloadReduction read_reduce_1bit(const Tensor& payload, const Tensor& error,
                                  const Tensor& payloads, double factor);

}  // namespace zero_ext::ops
