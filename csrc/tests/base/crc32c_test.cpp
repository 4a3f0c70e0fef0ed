#include "../../core/base/crc32c.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace zero_ext::core {
namespace {

// The definition, one bit at a time: the reference for every faster form.
std::uint32_t reference(std::span<const std::byte> bytes, std::uint32_t seed) {
  std::uint32_t state = ~seed;
  for (const std::byte value : bytes) {
    state ^= std::to_integer<std::uint32_t>(value);
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ ((state & 1u) != 0 ? 0x82F63B78u : 0u);
    }
  }
  return ~state;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

std::vector<std::byte> random_bytes(std::size_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& value : bytes) value = static_cast<std::byte>(random());
  return bytes;
}

std::mt19937_64 fresh_generator() {
  const auto seed = std::random_device{}();
  ::testing::Test::RecordProperty("random_seed", std::to_string(seed));
  std::printf("random seed %u\n", seed);
  return std::mt19937_64(seed);
}

using Form = std::uint32_t (*)(std::span<const std::byte>, std::uint32_t);

class Crc32c : public ::testing::TestWithParam<Form> {};

TEST_P(Crc32c, YieldsThePublishedValues) {  // RFC 3720 appendix B.4
  const Form form = GetParam();
  EXPECT_EQ(form(bytes_of("123456789"), 0), 0xE3069283u);
  EXPECT_EQ(form(std::vector<std::byte>(32, std::byte{0}), 0), 0x8A9136AAu);
  EXPECT_EQ(form(std::vector<std::byte>(32, std::byte{0xFF}), 0), 0x62A8AB43u);
  std::vector<std::byte> ascending;
  for (int value = 0; value < 32; ++value) ascending.push_back(static_cast<std::byte>(value));
  EXPECT_EQ(form(ascending, 0), 0x46DD794Eu);
  EXPECT_EQ(form({}, 0), 0u);
  EXPECT_EQ(form({}, 0x12345678u), 0x12345678u);
}

TEST_P(Crc32c, EqualsTheBitwiseDefinitionAtEveryLengthAndAlignment) {
  std::mt19937_64 random = fresh_generator();
  const auto bytes = random_bytes(3 * 6144 + 64, random);
  const std::span<const std::byte> all(bytes);
  std::vector<std::size_t> lengths;
  for (std::size_t length = 0; length < 40; ++length) lengths.push_back(length);
  for (const std::size_t around : {2048u, 4096u, 6144u, 12288u, 18432u}) {
    for (std::size_t length = around - 9; length <= around + 9; ++length) lengths.push_back(length);
  }
  for (const std::size_t length : lengths) {
    const std::size_t begin = random() % 17;
    const auto seed = static_cast<std::uint32_t>(random());
    const auto chunk = all.subspan(begin, length);
    EXPECT_EQ(GetParam()(chunk, seed), reference(chunk, seed)) << "length " << length;
  }
}

TEST_P(Crc32c, ContinuesAcrossAnyCut) {
  std::mt19937_64 random = fresh_generator();
  const auto bytes = random_bytes(20'000, random);
  const std::span<const std::byte> all(bytes);
  const std::uint32_t full = reference(all, 0);
  for (int trial = 0; trial < 50; ++trial) {
    const std::size_t cut = random() % (bytes.size() + 1);
    EXPECT_EQ(GetParam()(all.subspan(cut), GetParam()(all.first(cut), 0)), full) << "cut " << cut;
  }
}

TEST_P(Crc32c, SeesEverySingleBitFlip) {
  std::mt19937_64 random = fresh_generator();
  auto bytes = random_bytes(7000, random);
  const std::uint32_t full = GetParam()(bytes, 0);
  for (int trial = 0; trial < 500; ++trial) {
    const std::size_t at = random() % bytes.size();
    const auto mask = static_cast<std::byte>(1u << (random() % 8));
    bytes[at] ^= mask;
    EXPECT_NE(GetParam()(bytes, 0), full) << "byte " << at;
    bytes[at] ^= mask;
  }
}

std::vector<Form> forms() {
  std::vector<Form> found{&crc32c, &crc32c_portable};
  if (has_crc32c_hardware()) found.push_back(&crc32c_hardware);
  return found;
}

INSTANTIATE_TEST_SUITE_P(Forms, Crc32c, ::testing::ValuesIn(forms()));

}  // namespace
}  // namespace zero_ext::core
