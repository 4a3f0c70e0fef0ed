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
using core::testing::kTypeOf;
using testing::emulate_launch;
using testing::PayloadBuffer;
using testing::same_bits;

// Elements of a chunk: around a block and a run; runs alone, with blocks behind them and a short
// one; payloads that all begin at multiples of 16 bytes, and that do not.
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

core::PayloadTarget target_of(const PayloadBuffer& buffer, std::int64_t number,
                              const BlockFormat& format, std::int64_t chunk_numel) {
  auto* words =
      reinterpret_cast<std::uint32_t*>(buffer.data() + number * format.payload_bytes(chunk_numel));
  return {words, reinterpret_cast<float*>(words + format.words(chunk_numel))};
}

core::PayloadSource source_of(const PayloadBuffer& buffer, std::int64_t number,
                              const BlockFormat& format, std::int64_t chunk_numel) {
  const core::PayloadTarget found = target_of(buffer, number, format, chunk_numel);
  return {found.words, found.scales};
}

template <class Code>
BlockFormat format_of(std::int64_t size) {
  return {Code::kBits, Code::kIsSymmetric, size};
}

template <class Code>
class CudaIntegerBlocks : public ::testing::Test {
 protected:
  static constexpr std::int64_t kChunks = 4;
  static constexpr int kBits = Code::kBits;

  // Values begin `shift` elements past where runs are aligned, and payloads `words` words.
  template <class T>
  void compare(std::int64_t chunk_numel, std::int64_t size, std::int64_t shift,
               std::int64_t words) {
    const BlockFormat format = format_of<Code>(size);
    const std::int64_t bytes = kChunks * format.payload_bytes(chunk_numel);
    const std::vector<T> values =
        values_of<T>(static_cast<std::size_t>(kChunks * chunk_numel + shift), generator_);
    IntegerValues<T> source{values.data() + shift, chunk_numel, true, {}};
    std::iota(source.order, source.order + kChunks, 0);
    std::shuffle(source.order, source.order + kChunks, generator_);
    const PayloadBuffer payloads(bytes, words);
    const PayloadBuffer own(bytes, words);
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      core::quantize_blocks(values.data() + shift + source.order[chunk] * chunk_numel, kTypeOf<T>,
                            chunk_numel, format, target_of(payloads, chunk, format, chunk_numel));
    }
    emulate_launch(
        QuantizeIntegers<IntegerValues<T>, Code>{
            source, {own.data(), format, chunk_numel}, kChunks},
        3, generator_);
    EXPECT_TRUE(own.same_words(payloads)) << chunk_numel << " elements, blocks of " << size;
    read<T>(payloads, chunk_numel, size, shift);
  }

  template <class T>
  void read(const PayloadBuffer& payloads, std::int64_t chunk_numel, std::int64_t size,
            std::int64_t shift) {
    const BlockFormat format = format_of<Code>(size);
    std::vector<T> out(static_cast<std::size_t>(kChunks * chunk_numel + shift));
    std::vector<T> own = out;
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      core::dequantize_blocks(source_of(payloads, chunk, format, chunk_numel), chunk_numel, format,
                              out.data() + shift + chunk * chunk_numel, kTypeOf<T>);
    }
    emulate_launch(
        WriteIntegers<IntegerSum<kBits, true>, T>{
            {{payloads.data(), format, chunk_numel}, 1, 0, 1, 1.0F},
            kChunks,
            false,
            own.data() + shift},
        37, generator_);
    EXPECT_TRUE(same_bits(own, out)) << chunk_numel << " elements, blocks of " << size;
  }

  // Payloads of kChunks chunks from each of `senders`, as their all-to-all leaves them.
  PayloadBuffer exchanged(std::int64_t chunk_numel, const BlockFormat& format, std::int64_t senders,
                          std::int64_t words) {
    const PayloadBuffer payloads(senders * kChunks * format.payload_bytes(chunk_numel), words);
    for (std::int64_t m = 0; m < senders * kChunks; ++m) {
      const auto values = values_of<float>(static_cast<std::size_t>(chunk_numel), generator_);
      core::quantize_blocks(values.data(), core::NumericType::float32, chunk_numel, format,
                            target_of(payloads, m, format, chunk_numel));
    }
    return payloads;
  }

  static std::vector<core::PayloadSource> senders_of(const PayloadBuffer& payloads,
                                                     std::int64_t chunk, std::int64_t chunks,
                                                     std::int64_t senders,
                                                     const BlockFormat& format,
                                                     std::int64_t chunk_numel) {
    std::vector<core::PayloadSource> result;
    for (std::int64_t m = 0; m < senders; ++m) {
      result.push_back(source_of(payloads, m * chunks + chunk, format, chunk_numel));
    }
    return result;
  }

  void sum(std::int64_t chunk_numel, std::int64_t size, std::int64_t senders, std::int64_t shift,
           std::int64_t words) {
    const std::int64_t count = senders * kChunks;
    const bool accumulate = chunk_numel % 2 == 0;
    const BlockFormat format = format_of<Code>(size);
    const PayloadBuffer payloads = exchanged(chunk_numel, format, senders, words);
    std::vector<float> out =
        values_of<float>(static_cast<std::size_t>(chunk_numel + shift), generator_);
    std::vector<float> own = out;
    core::sum_quantized(senders_of(payloads, 0, 1, count, format, chunk_numel), 0, chunk_numel,
                        format, 0.3F, accumulate, out.data() + shift);
    emulate_launch(
        WriteIntegers<IntegerSum<kBits>, float>{
            {{payloads.data(), format, chunk_numel}, 0, 1, count, 0.3F},
            1,
            accumulate,
            own.data() + shift},
        3, generator_);
    EXPECT_TRUE(same_bits(own, out)) << chunk_numel << " elements, blocks of " << size;
  }

  // To another format.
  template <class To>
  void requantize(std::int64_t chunk_numel, std::int64_t size, std::int64_t senders = 3,
                  std::int64_t words = 0) {
    const BlockFormat from = format_of<Code>(size);
    const BlockFormat to = format_of<To>(size);
    const PayloadBuffer payloads = exchanged(chunk_numel, from, senders, words);
    const PayloadBuffer out(kChunks * to.payload_bytes(chunk_numel), words);
    const PayloadBuffer own(kChunks * to.payload_bytes(chunk_numel), words);
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      core::requantize_blocks(senders_of(payloads, chunk, kChunks, senders, from, chunk_numel), 0,
                              chunk_numel, from, to, 0.3F, target_of(out, chunk, to, chunk_numel));
    }
    const IntegerSum<kBits> sum{{payloads.data(), from, chunk_numel}, 1, kChunks, senders, 0.3F};
    emulate_launch(
        QuantizeIntegers<IntegerSum<kBits>, To>{sum, {own.data(), to, chunk_numel}, kChunks}, 5,
        generator_);
    EXPECT_TRUE(own.same_words(out)) << chunk_numel << " elements, blocks of " << size;
  }

  std::mt19937_64 generator_ = fresh_generator();
};

using Codes = ::testing::Types<core::IntegerCode<4, true>, core::IntegerCode<4, false>,
                               core::IntegerCode<8, true>, core::IntegerCode<8, false>>;
TYPED_TEST_SUITE(CudaIntegerBlocks, Codes);

TYPED_TEST(CudaIntegerBlocks, EveryLengthOrderAndAlignmentYieldsTheBitsOfTheCpu) {
  for (const std::int64_t chunk_numel : kShares) {
    for (const std::int64_t size : kSizes) {
      this->template compare<float>(chunk_numel, size, 0, 0);
      this->template compare<core::BFloat16>(chunk_numel, size, 0, 0);
      this->template compare<core::Float16>(chunk_numel, size, 1, 1);
      this->template compare<float>(chunk_numel, size, 1, 0);
      this->template compare<core::Float16>(chunk_numel, size, 8, 3);
    }
  }
}

TYPED_TEST(CudaIntegerBlocks, SumsAreTheCpusInTheOrderOfThePayloads) {
  for (const std::int64_t chunk_numel : kShares) {
    for (const std::int64_t size : kSizes) {
      this->sum(chunk_numel, size, 3, 0, 0);
      this->sum(chunk_numel, size, 1, 0, 2);
      this->sum(chunk_numel, size, 2, 3, 0);
    }
  }
}

TYPED_TEST(CudaIntegerBlocks, SumsThatAreQuantizedAgainAreTheCpus) {
  for (const std::int64_t chunk_numel : kShares) {
    this->template requantize<TypeParam>(chunk_numel, 128);
    this->template requantize<core::IntegerCode<4, true>>(chunk_numel, 256);
    this->template requantize<core::IntegerCode<8, false>>(chunk_numel, 256);
    this->template requantize<core::IntegerCode<4, false>>(chunk_numel, 256, 9, 1);
    this->template requantize<core::IntegerCode<8, true>>(chunk_numel, 256, 8);
  }
}

TYPED_TEST(CudaIntegerBlocks, AZeroRetainsItsSignInASum) {
  // One payload whose elements are all the lowest, -0: the sum of it alone is -0 too.
  constexpr std::int64_t chunk_numel = 1024;
  const BlockFormat format = format_of<TypeParam>(256);
  const PayloadBuffer payload(format.payload_bytes(chunk_numel), 0);
  std::fill_n(payload.data(), format.payload_bytes(chunk_numel), std::uint8_t{0});
  auto* scales = reinterpret_cast<float*>(payload.data()) + format.words(chunk_numel);
  for (int i = 0; i < 4 * format.scales(); ++i) scales[i] = -0.0F;
  std::vector<float> expected(chunk_numel);
  core::dequantize_blocks(source_of(payload, 0, format, chunk_numel), chunk_numel, format,
                          expected.data(), core::NumericType::float32);
  std::vector<float> own(chunk_numel, 7.0F);
  emulate_launch(
      WriteIntegers<IntegerSum<TypeParam::kBits>, float>{
          {{payload.data(), format, chunk_numel}, 0, 1, 1, 1.0F}, 1, false, own.data()},
      1, this->generator_);
  EXPECT_TRUE(same_bits(own, expected));
}

}  // namespace
}  // namespace zero_ext::cuda
