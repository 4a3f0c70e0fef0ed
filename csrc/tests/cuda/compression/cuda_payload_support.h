// What the tests of compressed payloads on a device share.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "../../../core/base/numeric_types.h"

namespace zero_ext::testing {

// Bytes for payloads, not zeros, that begin `shift` words past an address that is a multiple of 16;
// writing beyond their end shows.
class PayloadBuffer {
 public:
  PayloadBuffer(std::int64_t bytes, std::int64_t shift)
      : bytes_(bytes),
        shift_(4 * shift),
        memory_(static_cast<std::size_t>(bytes + shift_) / 16 + 2) {
    std::fill(memory_.begin(), memory_.end(), CacheLine{});
  }

  std::uint8_t* data() const { return const_cast<std::uint8_t*>(memory_[0].bytes) + shift_; }

  // Words and floats alike; any NaN equals any NaN, and no code is one, but then all are.
  bool same_words(const PayloadBuffer& other) const {
    const auto* one = reinterpret_cast<const std::uint32_t*>(memory_[0].bytes);
    const auto* two = reinterpret_cast<const std::uint32_t*>(other.memory_[0].bytes);
    return memory_.size() == other.memory_.size() &&
           std::equal(one, one + memory_.size() * 4, two, [](std::uint32_t a, std::uint32_t b) {
             return a == b || (is_nan(a) && is_nan(b));
           });
  }

 private:
  struct alignas(16) CacheLine {
    std::uint8_t bytes[16] = {0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5,
                              0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5, 0xA5};
  };
  static bool is_nan(std::uint32_t bits) { return (bits & 0x7FFFFFFFU) > 0x7F800000U; }

  std::int64_t bytes_;
  std::int64_t shift_;
  std::vector<CacheLine> memory_;
};

// Bit for bit, but any NaN equals any NaN.
template <class T>
bool same_bits(const std::vector<T>& first, const std::vector<T>& second) {
  return std::equal(first.begin(), first.end(), second.begin(), second.end(), [](T a, T b) {
    const float one = core::to_float(a);
    const float two = core::to_float(b);
    return std::bit_cast<core::UnsignedOf<T>>(a) == std::bit_cast<core::UnsignedOf<T>>(b) ||
           (one != one && two != two);
  });
}

}  // namespace zero_ext::testing
