#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zero_ext::core {
namespace {

// Polynomials over GF(2) modulo the Castagnoli polynomial, bit-reflected: bit 31 is x^0.
constexpr std::uint32_t kPolynomial = 0x82F63B78u;
constexpr std::uint32_t kOne = 0x80000000u;

constexpr std::uint32_t times_x(std::uint32_t a) {
  return (a >> 1) ^ ((a & 1u) != 0 ? kPolynomial : 0u);
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if (((a >> bit) & 1u) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  std::uint32_t result = kOne;
  std::uint32_t square = times_x(kOne);
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1u) != 0) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

using ByteTables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][v] is the effect of byte v followed by k zero bytes.
constexpr ByteTables make_byte_tables() {
  ByteTables tables{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t state = value;
    for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    tables[0][value] = state;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t value = 0; value < 256; ++value) {
      const std::uint32_t before = tables[k - 1][value];
      tables[k][value] = (before >> 8) ^ tables[0][before & 0xFFu];
    }
  }
  return tables;
}

constexpr ByteTables kByteTables = make_byte_tables();

std::uint64_t load_little_endian(const std::byte* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

#if defined(__x86_64__)

// The crc32 instruction takes three cycles and starts one each cycle: three lanes keep it busy.
constexpr std::size_t kLaneBytes = 2048;

using ShiftTables = std::array<std::array<std::uint32_t, 256>, 4>;

// Moves a state past kLaneBytes zero bytes, one table for each byte of the state.
constexpr ShiftTables make_shift_tables() {
  ShiftTables tables{};
  const std::uint32_t factor = power_of_x(8 * kLaneBytes);
  for (std::size_t position = 0; position < tables.size(); ++position) {
    for (std::uint32_t bit = 0; bit < 8; ++bit) {
      const std::uint32_t single = multiply(1u << (8 * position + bit), factor);
      for (std::uint32_t low = 0; low < (1u << bit); ++low) {
        tables[position][(1u << bit) + low] = single ^ tables[position][low];
      }
    }
  }
  return tables;
}

constexpr ShiftTables kShiftTables = make_shift_tables();

std::uint64_t shift_past_lane(std::uint64_t state) {
  return kShiftTables[0][state & 0xFFu] ^ kShiftTables[1][(state >> 8) & 0xFFu] ^
         kShiftTables[2][(state >> 16) & 0xFFu] ^ kShiftTables[3][(state >> 24) & 0xFFu];
}

__attribute__((target("sse4.2"))) std::uint32_t run_hardware(std::span<const std::byte> bytes,
                                                             std::uint32_t seed) {
  const std::byte* cursor = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t state = ~seed;
  while (left >= 3 * kLaneBytes) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t offset = 0; offset < kLaneBytes; offset += 8) {
      const std::byte* word = cursor + offset;
      state = _mm_crc32_u64(state, load_little_endian(word));
      second = _mm_crc32_u64(second, load_little_endian(word + kLaneBytes));
      third = _mm_crc32_u64(third, load_little_endian(word + 2 * kLaneBytes));
    }
    state = shift_past_lane(shift_past_lane(state) ^ second) ^ third;
    cursor += 3 * kLaneBytes;
    left -= 3 * kLaneBytes;
  }
  for (; left >= 8; cursor += 8, left -= 8) {
    state = _mm_crc32_u64(state, load_little_endian(cursor));
  }
  auto narrow = static_cast<std::uint32_t>(state);
  for (; left != 0; ++cursor, --left) {
    narrow = _mm_crc32_u8(narrow, std::to_integer<std::uint8_t>(*cursor));
  }
  return ~narrow;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t seed) {
  const std::byte* cursor = bytes.data();
  std::size_t left = bytes.size();
  std::uint32_t state = ~seed;
  for (; left >= 8; cursor += 8, left -= 8) {
    const std::uint64_t word = load_little_endian(cursor) ^ state;
    state = 0;
    for (std::size_t k = 0; k < 8; ++k) state ^= kByteTables[7 - k][(word >> (8 * k)) & 0xFFu];
  }
  for (; left != 0; ++cursor, --left) {
    const auto value = std::to_integer<std::uint32_t>(*cursor);
    state = (state >> 8) ^ kByteTables[0][(state ^ value) & 0xFFu];
  }
  return ~state;
}

bool has_crc32c_hardware() {
#if defined(__x86_64__)
  static const bool present = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
  }();
  return present;
#else
  return false;
#endif
}

std::uint32_t crc32c_hardware(std::span<const std::byte> bytes, std::uint32_t seed) {
#if defined(__x86_64__)
  return run_hardware(bytes, seed);
#else
  return crc32c_portable(bytes, seed);
#endif
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  return has_crc32c_hardware() ? crc32c_hardware(bytes, seed) : crc32c_portable(bytes, seed);
}

}  // namespace zero_ext::core
