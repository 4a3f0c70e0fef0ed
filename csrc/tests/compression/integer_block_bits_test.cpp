// Payloads of integer blocks have the same bits however they are made: with any instruction set,
// from any type, past the caches or not, in groups of any size, of any elements.
#include <bit>
#include <cmath>
#include <limits>

#include "../../core/compression/integer_blocks.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::kTypeOf;
using testing::SelectedIsa;

constexpr std::int64_t kSizes[] = {128, 256, 384, 4096};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

std::vector<BlockFormat> formats_of(std::int64_t size) {
  return {{4, false, size}, {4, true, size}, {8, false, size}, {8, true, size}};
}

// A poisoned payload that starts `past` words behind a line of the cache.
class Payload {
 public:
  Payload(const BlockFormat& format, std::int64_t count, std::int64_t past = 0)
      : words_(format.words(count)),
        size_(format.payload_bytes(count) / 4),
        memory_(size_ + 64, 0xA5A5A5A5U) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data()) % 64 / 4;
    begin_ = (16 - at) % 16 + past;
  }
  std::uint32_t* words() { return memory_.data() + begin_; }
  float* scales() { return reinterpret_cast<float*>(words() + words_); }
  PayloadSource source() { return {words(), scales()}; }
  PayloadTarget from(std::int64_t block, const BlockFormat& format) {
    return {words() + block * format.words(format.block), scales() + block * format.scales()};
  }
  std::vector<std::uint32_t> bits() {
    for (std::int64_t i = 0; i < std::ssize(memory_); ++i) {
      const bool is_own = i >= begin_ && i < begin_ + size_;
      if (!is_own) {
        EXPECT_EQ(memory_[i], 0xA5A5A5A5U);
      }
    }
    return {words(), words() + size_};
  }

 private:
  std::int64_t words_;
  std::int64_t size_;
  std::vector<std::uint32_t> memory_;
  std::int64_t begin_;
};

template <class T>
std::vector<std::uint32_t> quantized(const std::vector<T>& values, const BlockFormat& format,
                                     std::int64_t past = 0) {
  Payload payload(format, std::ssize(values), past);
  quantize_blocks(values.data(), kTypeOf<T>, std::ssize(values), format, payload.from(0, format));
  return payload.bits();
}

// By the scalar kernels, block by block.
template <class T>
std::vector<std::uint32_t> expected_bits(const std::vector<T>& values, const BlockFormat& format) {
  const SelectedIsa selected(Isa::scalar);
  const std::int64_t count = std::ssize(values);
  std::vector<float> wide;
  for (const T value : values) wide.push_back(to_float(value));
  Payload payload(format, count);
  for (std::int64_t block = 0; block < format.blocks(count); ++block) {
    const std::int64_t begin = block * format.block;
    quantize_blocks(wide.data() + begin, NumericType::float32,
                    std::min(format.block, count - begin), format, payload.from(block, format));
  }
  return payload.bits();
}

// Each run of 128 elements is of one kind; most have an element of another in any place.
template <class T>
std::vector<T> any_values(std::mt19937_64& generator, std::int64_t count) {
  constexpr float kFactors[] = {1, 1e-3F, 1e4F, 1e-38F, 1e-42F, 0, -0.0F};
  constexpr float kOthers[] = {0, -0.0F, kNaN, -kNaN, kInfinity, -kInfinity, kLargest, -kLargest};
  auto values = testing::normal_values<float>(generator, count);
  for (std::int64_t begin = 0; begin < count; begin += 128) {
    const float factor = kFactors[generator() % std::size(kFactors)];
    const std::uint64_t sign = generator() % 4;
    const std::int64_t end = std::min(begin + 128, count);
    for (std::int64_t i = begin; i < end; ++i) {
      if (sign < 2) values[i] = std::copysign(values[i], sign == 0 ? 1.0F : -1.0F);
      values[i] *= factor;
    }
    for (std::uint64_t other = generator() % 3; other > 0; --other) {
      values[begin + generator() % (end - begin)] = kOthers[generator() % std::size(kOthers)];
    }
  }
  std::vector<T> result(count);
  std::transform(values.begin(), values.end(), result.begin(),
                 [](float value) { return from_float<T>(value); });
  for (std::int64_t i = 0; i < count; ++i) {
    // What is rounded to this type has no NaN of the other sign.
    if constexpr (sizeof(T) == 2) {
      if (std::isnan(values[i]) && std::signbit(values[i])) result[i].bits |= 0x8000U;
    }
  }
  return result;
}

template <class T>
void compare_any_values() {
  auto generator = fresh_generator();
  for (const std::int64_t size : kSizes) {
    // Less than a group, whole groups, and a short block behind them.
    for (const std::int64_t count : {size, 33 * size, 32 * size, 17 * size + 29}) {
      const auto values = any_values<T>(generator, count);
      for (const BlockFormat& format : formats_of(size)) {
        const auto expected = expected_bits(values, format);
        for (const Isa isa : available_isas()) {
          const SelectedIsa selected(isa);
          ASSERT_EQ(quantized(values, format, 3), expected) << size << ' ' << count;
        }
      }
    }
  }
}

TEST(IntegerBlockBits, OfAnyFloat32) { compare_any_values<float>(); }
TEST(IntegerBlockBits, OfAnyBFloat16) { compare_any_values<BFloat16>(); }
TEST(IntegerBlockBits, OfAnyFloat16) { compare_any_values<Float16>(); }

TEST(IntegerBlockBits, AnElementThatIsNotFiniteIsSeenAtEveryIndex) {
  constexpr std::int64_t size = 128;
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const BlockFormat& format : formats_of(size)) {
      for (std::int64_t index = 0; index < size; ++index) {
        for (const std::uint16_t bits : {0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFF81}) {
          std::vector<BFloat16> values(size, BFloat16{0x3F80});
          values[index].bits = bits;
          std::vector<float> wide;
          for (const BFloat16 value : values) wide.push_back(to_float(value));
          const auto narrow = quantized(values, format);
          const auto scale = std::bit_cast<float>(narrow[format.words(size)]);
          ASSERT_TRUE(std::isnan(scale)) << index << ' ' << bits;
          ASSERT_EQ(quantized(wide, format), narrow) << index << ' ' << bits;
        }
      }
    }
  }
}

template <class T>
void compare_streamed() {
  auto generator = fresh_generator();
  for (const BlockFormat& format : formats_of(256)) {
    const std::int64_t count = (std::int64_t{1} << 18) * format.fields() + 77;
    const auto values = testing::normal_values<T>(generator, count);
    const auto expected = expected_bits(values, format);
    for (const Isa isa : available_isas()) {
      const SelectedIsa selected(isa);
      for (const std::int64_t past : {0, 8}) {
        ASSERT_TRUE(quantized(values, format, past) == expected) << past;
      }
    }
  }
}

TEST(IntegerBlockBits, StreamedFromFloat32) { compare_streamed<float>(); }
TEST(IntegerBlockBits, StreamedFromBFloat16) { compare_streamed<BFloat16>(); }

// Payloads of `count` elements of any codes, whose scales need not be those of any elements.
std::vector<Payload> any_payloads(std::mt19937_64& generator, int senders, std::int64_t count,
                                  const BlockFormat& format, bool are_usual) {
  constexpr float kUnusual[] = {0, 1e-38F, 1e-42F, 1e30F, kLargest, kInfinity, -kInfinity, kNaN};
  std::vector<Payload> payloads;
  for (int i = 0; i < senders; ++i) {
    Payload& payload = payloads.emplace_back(format, count, i);
    std::generate_n(payload.words(), format.words(count), [&] { return generator(); });
    std::generate_n(payload.scales(), format.blocks(count) * format.scales(), [&] {
      const bool is_unusual = !are_usual && generator() % 16 == 0;
      const float sign = generator() % 2 == 0 ? 1.0F : -1.0F;
      return sign * (is_unusual ? kUnusual[generator() % std::size(kUnusual)]
                                : static_cast<float>(generator() % 1000) * 1e-3F);
    });
  }
  return payloads;
}

void compare_requantized(std::mt19937_64& generator, std::int64_t count, const BlockFormat& from,
                         float factor, bool are_usual) {
  auto payloads = any_payloads(generator, 1 + generator() % 6, count, from, are_usual);
  std::vector<PayloadSource> sources;
  for (Payload& payload : payloads) sources.push_back(payload.source());
  std::vector<float> sum(count, -7);
  {
    const SelectedIsa selected(Isa::scalar);
    sum_quantized(sources, 0, count, from, factor, false, sum.data());
  }
  for (const BlockFormat& to : formats_of(from.block)) {
    const auto expected = expected_bits(sum, to);
    for (const Isa isa : available_isas()) {
      const SelectedIsa selected(isa);
      for (const std::int64_t past : {0, 3}) {
        Payload again(to, count, past);
        requantize_blocks(sources, 0, count, from, to, factor, again.from(0, to));
        ASSERT_TRUE(again.bits() == expected) << count << ' ' << from.block << ' ' << past;
      }
    }
  }
}

TEST(IntegerBlockBits, RequantizedOfAnyPayloads) {
  auto generator = fresh_generator();
  for (const std::int64_t size : kSizes) {
    for (const BlockFormat& from : formats_of(size)) {
      for (const std::int64_t count : {size, 2 * size, 35 * size + 3}) {
        for (const float factor : {0.25F, -1 / 3.0F, 0.0F, 0x1p100F, 0x1p-140F}) {
          compare_requantized(generator, count, from, factor, generator() % 2 == 0);
        }
      }
    }
  }
}

// All but one are zeros, so that no other element shows what is not finite.
TEST(IntegerBlockBits, InfinitiesThatMeetInOneSumAreSeenAtEveryIndex) {
  constexpr std::int64_t size = 128;
  for (const BlockFormat& from : formats_of(size)) {
    const std::uint32_t mask = (1U << from.bits) - 1;
    const std::uint32_t zeros =
        from.is_symmetric ? 0xFFFFFFFFU / mask * ((mask + 1) / 2) : std::uint32_t{0};
    for (std::int64_t index = 0; index < size; ++index) {
      std::vector<Payload> payloads;
      std::vector<PayloadSource> sources;
      for (const float scale : {kLargest, -kLargest}) {
        Payload& payload = payloads.emplace_back(from, 2 * size);
        std::fill_n(payload.words(), from.words(2 * size), zeros);
        std::fill_n(payload.scales(), 2 * from.scales(), 0.0F);
        payload.scales()[0] = scale;
        const std::int64_t words = from.words(size);
        payload.words()[index % words] |= mask << (index / words * from.bits);
      }
      for (Payload& payload : payloads) sources.push_back(payload.source());
      for (const BlockFormat& to : formats_of(size)) {
        for (const Isa isa : available_isas()) {
          const SelectedIsa selected(isa);
          Payload again(to, 2 * size);
          requantize_blocks(sources, 0, 2 * size, from, to, 0.5F, again.from(0, to));
          ASSERT_TRUE(std::isnan(again.scales()[0])) << index;
          ASSERT_EQ(again.scales()[to.scales()], 0.0F) << index;
        }
      }
    }
  }
}

TEST(IntegerBlockBits, RequantizedPastTheCaches) {
  auto generator = fresh_generator();
  for (const BlockFormat& from : {BlockFormat{4, true, 256}, BlockFormat{8, false, 256}}) {
    compare_requantized(generator, (std::int64_t{1} << 21) + 256 + 9, from, 0.25F, true);
  }
}

}  // namespace
}  // namespace zero_ext::core
