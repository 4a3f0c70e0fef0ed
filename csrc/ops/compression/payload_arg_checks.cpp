#include "payload_arg_checks.h"

#include <cmath>
#include <numeric>

namespace zero_ext::ops {

Payloads read_payloads(const Argument& argument, const Tensor& payloads, std::int64_t count,
                       std::int64_t bytes, std::int64_t words) {
  check_dtype(payloads, argument, ScalarType::Byte);
  const std::int64_t numel = payloads.numel();
  if (count >= 0) {
    check_flat(payloads, argument, count * bytes);
  } else {
    check_flat(payloads, argument, numel);
    count = bytes == 0 ? 1 : numel / bytes;
    STD_TORCH_CHECK(count > 0 && numel == count * bytes, label(argument),
                    "expected one or more payloads of ", bytes, " bytes each, got ", numel,
                    " bytes. Allocate a multiple of that.");
  }
  auto* data = static_cast<std::byte*>(payloads.mutable_data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(data) % 4 == 0, label(argument),
                  "expected an address that is a multiple of 4, got ", data,
                  ". Begin a view at a multiple of 4 bytes, or allocate memory for it.");
  return {data, count, bytes, words};
}

std::int64_t check_chunks(const char* op, std::int64_t numel, std::int64_t chunks) {
  STD_TORCH_CHECK(chunks > 0 && numel % chunks == 0, op, ": elements: expected a multiple of the ",
                  chunks, " chunks, got ", numel, ". Pad them.");
  return numel / chunks;
}

float check_factor(const char* op, double factor) {
  const auto result = static_cast<float>(factor);
  STD_TORCH_CHECK(std::isfinite(result), op,
                  ": factor: expected a number that is finite in float32, got ", factor,
                  ". Pass a smaller one.");
  return result;
}

float* read_floats(const Argument& argument, const Tensor& tensor, std::int64_t numel) {
  check_dtype(tensor, argument, ScalarType::Float);
  check_flat(tensor, argument, numel);
  return tensor.mutable_data_ptr<float>();
}

core::BlockFormat check_format(const char* op, std::int64_t bits, bool symmetric,
                               std::int64_t block) {
  STD_TORCH_CHECK(bits == 4 || bits == 8, op, ": format: expected 4 or 8 bits, got ", bits,
                  ". Pass one of these.");
  STD_TORCH_CHECK(
      block > 0 && block <= core::kMaxIntegerBlock && block % core::kIntegerBlockUnit == 0, op,
      ": format: expected blocks of a multiple of ", core::kIntegerBlockUnit, " elements up to ",
      core::kMaxIntegerBlock, ", got ", block, ". Pass such a block.");
  return {static_cast<int>(bits), symmetric, block};
}

Payloads read_blocks(const Argument& argument, const Tensor& payloads, std::int64_t count,
                     std::int64_t numel, const core::BlockFormat& format) {
  return read_payloads(argument, payloads, count, format.payload_bytes(numel), format.words(numel));
}

Payloads read_sign_bits(const Argument& argument, const Tensor& payloads, std::int64_t count,
                        std::int64_t numel) {
  return read_payloads(argument, payloads, count, core::sign_payload_bytes(numel),
                       core::sign_words(numel));
}

std::vector<std::int64_t> check_order(const char* op, std::vector<std::int64_t> order,
                                      std::int64_t chunks) {
  if (order.empty()) {
    order.resize(static_cast<std::size_t>(chunks));
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
  STD_TORCH_CHECK(static_cast<std::int64_t>(order.size()) == chunks, op,
                  ": order: expected each of the ", chunks, " chunks once, got ", order.size(),
                  " numbers. Pass a permutation.");
  std::vector<bool> named(order.size());
  for (const std::int64_t chunk : order) {
    STD_TORCH_CHECK(chunk >= 0 && chunk < chunks && !named[static_cast<std::size_t>(chunk)], op,
                    ": order: expected each of 0 to ", chunks - 1, " once, got ", chunk,
                    chunk >= 0 && chunk < chunks ? " twice" : "", ". Pass a permutation.");
    named[static_cast<std::size_t>(chunk)] = true;
  }
  return order;
}

}  // namespace zero_ext::ops
