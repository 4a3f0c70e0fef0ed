#include <cmath>
#include <limits>
#include <numeric>

#include "../../../core/compression/integer_blocks.h"
#include "../../../cuda/compression/integer_blocks_kernel.h"
#include "../../test_support.h"
#include "../emulated_launch.h"
#include "cuda_payload_support.h"

namespace zero_ext::cuda {
namespace {

using core::BlockFormat;
using core::testing::fresh_generator;
using testing::emulate_launch;
using testing::kTypeOf;
using testing::Room;
using testing::same_bits;

// Elements of a part: around a block and a run; runs alone, with blocks behind them and a short
// one; messages that all begin at multiples of 16 bytes, and that do not.
constexpr std::int64_t kShares[] = {0,    1,    9,    127,  255,  256,  257,  768, 1023,
                                    1024, 1025, 1280, 1291, 2560, 4096, 8192, 9000};
constexpr std::int64_t kSizes[] = {128, 256, 4096};

// A magnitude for each run of 128 elements, zeros and constants among them; sometimes an element
// that is not finite, or two whose distance is not.
template <class T>
std::vector<T> values_of(std::size_t count, std::mt19937_64& generator) {
  std::vector<float> values = core::testing::normal_values<float>(generator, count);
  constexpr float kFactors[] = {1, 1, 1, 1e-3F, 1e4F, 1e-38F, 1e-42F, 0, -0.0F};
  float factor = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 128 == 0) factor = kFactors[generator() % 9];
    values[i] = generator() % 16 == 0 ? -0.0F : values[i] * factor;
    if (generator() % 3000 == 0) values[i] = std::numeric_limits<float>::infinity();
    if (generator() % 3000 == 0) values[i] = std::numeric_limits<float>::quiet_NaN();
    if (generator() % 2000 == 0) values[i] = generator() % 2 == 0 ? 3e38F : -3e38F;
  }
  std::vector<T> result(count);
  std::transform(values.begin(), values.end(), result.begin(),
                 [](float value) { return core::from_float<T>(value); });
  return result;
}

core::MessageTarget target_of(const Room& room, std::int64_t number, const BlockFormat& format,
                              std::int64_t share) {
  auto* words =
      reinterpret_cast<std::uint32_t*>(room.data() + number * format.message_bytes(share));
  return {words, reinterpret_cast<float*>(words + format.words(share))};
}

core::MessageSource source_of(const Room& room, std::int64_t number, const BlockFormat& format,
                              std::int64_t share) {
  const core::MessageTarget found = target_of(room, number, format, share);
  return {found.words, found.scales};
}

template <class Code>
BlockFormat format_of(std::int64_t size) {
  return {Code::kBits, Code::kIsSymmetric, size};
}

template <class Code>
class CudaIntegerBlocks : public ::testing::Test {
 protected:
  static constexpr std::int64_t kParts = 4;
  static constexpr int kBits = Code::kBits;

  // Values begin `shift` elements past where runs are aligned, and messages `words` words.
  template <class T>
  void compare(std::int64_t share, std::int64_t size, std::int64_t shift, std::int64_t words) {
    const BlockFormat format = format_of<Code>(size);
    const std::int64_t bytes = kParts * format.message_bytes(share);
    const std::vector<T> values =
        values_of<T>(static_cast<std::size_t>(kParts * share + shift), generator_);
    IntegerValues<T> source{values.data() + shift, share, true, {}};
    std::iota(source.order, source.order + kParts, 0);
    std::shuffle(source.order, source.order + kParts, generator_);
    const Room messages(bytes, words);
    const Room own(bytes, words);
    for (std::int64_t part = 0; part < kParts; ++part) {
      core::quantize_blocks(values.data() + shift + source.order[part] * share, kTypeOf<T>, share,
                            format, target_of(messages, part, format, share));
    }
    emulate_launch(
        QuantizeIntegers<IntegerValues<T>, Code>{source, {own.data(), format, share}, kParts}, 3,
        generator_);
    EXPECT_TRUE(own.same_words(messages)) << share << " elements, blocks of " << size;
    read<T>(messages, share, size, shift);
  }

  template <class T>
  void read(const Room& messages, std::int64_t share, std::int64_t size, std::int64_t shift) {
    const BlockFormat format = format_of<Code>(size);
    std::vector<T> out(static_cast<std::size_t>(kParts * share + shift));
    std::vector<T> own = out;
    for (std::int64_t part = 0; part < kParts; ++part) {
      core::dequantize_blocks(source_of(messages, part, format, share), share, format,
                              out.data() + shift + part * share, kTypeOf<T>);
    }
    emulate_launch(
        WriteIntegers<IntegerSum<kBits, true>, T>{
            {{messages.data(), format, share}, 1, 0, 1, 1.0F}, kParts, false, own.data() + shift},
        37, generator_);
    EXPECT_TRUE(same_bits(own, out)) << share << " elements, blocks of " << size;
  }

  // Messages of kParts parts from each of `senders`, as their all-to-all leaves them.
  Room exchanged(std::int64_t share, const BlockFormat& format, std::int64_t senders,
                 std::int64_t words) {
    const Room messages(senders * kParts * format.message_bytes(share), words);
    for (std::int64_t m = 0; m < senders * kParts; ++m) {
      const auto values = values_of<float>(static_cast<std::size_t>(share), generator_);
      core::quantize_blocks(values.data(), core::NumericType::float32, share, format,
                            target_of(messages, m, format, share));
    }
    return messages;
  }

  static std::vector<core::MessageSource> senders_of(const Room& messages, std::int64_t part,
                                                     std::int64_t parts, std::int64_t senders,
                                                     const BlockFormat& format,
                                                     std::int64_t share) {
    std::vector<core::MessageSource> result;
    for (std::int64_t m = 0; m < senders; ++m) {
      result.push_back(source_of(messages, m * parts + part, format, share));
    }
    return result;
  }

  void sum(std::int64_t share, std::int64_t size, std::int64_t senders, std::int64_t shift,
           std::int64_t words) {
    const std::int64_t count = senders * kParts;
    const bool accumulate = share % 2 == 0;
    const BlockFormat format = format_of<Code>(size);
    const Room messages = exchanged(share, format, senders, words);
    std::vector<float> out = values_of<float>(static_cast<std::size_t>(share + shift), generator_);
    std::vector<float> own = out;
    core::sum_quantized(senders_of(messages, 0, 1, count, format, share), 0, share, format, 0.3F,
                        accumulate, out.data() + shift);
    emulate_launch(
        WriteIntegers<IntegerSum<kBits>, float>{
            {{messages.data(), format, share}, 0, 1, count, 0.3F},
            1,
            accumulate,
            own.data() + shift},
        3, generator_);
    EXPECT_TRUE(same_bits(own, out)) << share << " elements, blocks of " << size;
  }

  // To another format.
  template <class To>
  void requantize(std::int64_t share, std::int64_t size, std::int64_t senders = 3,
                  std::int64_t words = 0) {
    const BlockFormat from = format_of<Code>(size);
    const BlockFormat to = format_of<To>(size);
    const Room messages = exchanged(share, from, senders, words);
    const Room out(kParts * to.message_bytes(share), words);
    const Room own(kParts * to.message_bytes(share), words);
    for (std::int64_t part = 0; part < kParts; ++part) {
      core::requantize_blocks(senders_of(messages, part, kParts, senders, from, share), 0, share,
                              from, to, 0.3F, target_of(out, part, to, share));
    }
    const IntegerSum<kBits> sum{{messages.data(), from, share}, 1, kParts, senders, 0.3F};
    emulate_launch(QuantizeIntegers<IntegerSum<kBits>, To>{sum, {own.data(), to, share}, kParts}, 5,
                   generator_);
    EXPECT_TRUE(own.same_words(out)) << share << " elements, blocks of " << size;
  }

  std::mt19937_64 generator_ = fresh_generator();
};

using Codes = ::testing::Types<core::IntegerCode<4, true>, core::IntegerCode<4, false>,
                               core::IntegerCode<8, true>, core::IntegerCode<8, false>>;
TYPED_TEST_SUITE(CudaIntegerBlocks, Codes);

TYPED_TEST(CudaIntegerBlocks, EveryLengthOrderAndAlignmentGivesTheBitsOfTheCpu) {
  for (const std::int64_t share : kShares) {
    for (const std::int64_t size : kSizes) {
      this->template compare<float>(share, size, 0, 0);
      this->template compare<core::BFloat16>(share, size, 0, 0);
      this->template compare<core::Float16>(share, size, 1, 1);
      this->template compare<float>(share, size, 1, 0);
      this->template compare<core::Float16>(share, size, 8, 3);
    }
  }
}

TYPED_TEST(CudaIntegerBlocks, SumsAreTheCpusInTheOrderOfTheMessages) {
  for (const std::int64_t share : kShares) {
    for (const std::int64_t size : kSizes) {
      this->sum(share, size, 3, 0, 0);
      this->sum(share, size, 1, 0, 2);
      this->sum(share, size, 2, 3, 0);
    }
  }
}

TYPED_TEST(CudaIntegerBlocks, SumsThatAreQuantizedAgainAreTheCpus) {
  for (const std::int64_t share : kShares) {
    this->template requantize<TypeParam>(share, 128);
    this->template requantize<core::IntegerCode<4, true>>(share, 256);
    this->template requantize<core::IntegerCode<8, false>>(share, 256);
    this->template requantize<core::IntegerCode<4, false>>(share, 256, 9, 1);
    this->template requantize<core::IntegerCode<8, true>>(share, 256, 8);
  }
}

TYPED_TEST(CudaIntegerBlocks, AZeroKeepsItsSignInASum) {
  // One message whose elements are all the lowest, -0: the sum of it alone is -0 too.
  constexpr std::int64_t share = 1024;
  const BlockFormat format = format_of<TypeParam>(256);
  const Room message(format.message_bytes(share), 0);
  std::fill_n(message.data(), format.message_bytes(share), std::uint8_t{0});
  auto* scales = reinterpret_cast<float*>(message.data()) + format.words(share);
  for (int i = 0; i < 4 * format.scales(); ++i) scales[i] = -0.0F;
  std::vector<float> wanted(share);
  core::dequantize_blocks(source_of(message, 0, format, share), share, format, wanted.data(),
                          core::NumericType::float32);
  std::vector<float> own(share, 7.0F);
  emulate_launch(
      WriteIntegers<IntegerSum<TypeParam::kBits>, float>{
          {{message.data(), format, share}, 0, 1, 1, 1.0F}, 1, false, own.data()},
      1, this->generator_);
  EXPECT_TRUE(same_bits(own, wanted));
}

}  // namespace
}  // namespace zero_ext::cuda
