// The tensors of compressed payloads, checked before anything changes.
#pragma once

#include <string>
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

  core::PayloadTarget target(std::int64_t payload) const {
    auto* start = reinterpret_cast<std::uint32_t*>(data + payload * bytes);
    return {start, reinterpret_cast<float*>(start + words)};
  }
  core::PayloadSource source(std::int64_t payload) const {
    const core::PayloadTarget found = target(payload);
    return {found.words, found.scales};
  }
  // Payload `first` and each `step` further on.
  std::vector<core::PayloadSource> every(std::int64_t first, std::int64_t step) const {
    std::vector<core::PayloadSource> result;
    for (std::int64_t i = first; i < count; i += step) result.push_back(source(i));
    return result;
  }
};

// uint8, flat, aligned to 4 bytes and a whole number of payloads of `bytes`, exactly `count` unless
// that is -1 (then one or more).
Payloads read_payloads(const Argument& argument, const Tensor& payloads, std::int64_t count,
                       std::int64_t bytes, std::int64_t words);

// `numel` / `chunks`; refused unless that is a whole number.
std::int64_t check_chunks(const char* op, std::int64_t numel, std::int64_t chunks);

// As float; refused unless finite.
float check_factor(const char* op, double factor);

// A float32 argument, flat with `numel` elements.
float* read_floats(const Argument& argument, const Tensor& tensor, std::int64_t numel);

core::BlockFormat check_format(const char* op, std::int64_t bits, bool symmetric,
                               std::int64_t block);

// The same for payloads in a format of integer blocks, of `numel` elements each.
Payloads read_blocks(const Argument& argument, const Tensor& payloads, std::int64_t count,
                     std::int64_t numel, const core::BlockFormat& format);

// For payloads to signs of `numel` elements each.
Payloads read_sign_bits(const Argument& argument, const Tensor& payloads, std::int64_t count,
                        std::int64_t numel);

// Part of the values that slot p of the payloads holds, for each p; `order` empty: p itself.
std::vector<std::int64_t> check_order(const char* op, std::vector<std::int64_t> order,
                                      std::int64_t chunks);

}  // namespace zero_ext::ops
