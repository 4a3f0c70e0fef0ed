#include <cmath>
#include <limits>
#include <utility>

#include "../../../core/compression/sign_compression.h"
#include "../../../cuda/compression/sign_kernel.h"
#include "../../test_support.h"
#include "../emulated_launch.h"
#include "../thread_block_emulator.h"
#include "cuda_payload_support.h"

namespace zero_ext::cuda {
namespace {

using core::testing::fresh_generator;
using core::testing::kTypeOf;
using testing::emulate_grid;
using testing::emulate_launch;
using testing::PayloadBuffer;
using testing::same_bits;

// Elements of a chunk: around a byte, a word, a tile, a run and a block; and several blocks, with
// payloads that all begin at multiples of 16 bytes, and that do not.
constexpr std::int64_t kShares[] = {0,    1,    7,    8,     31,    32,    33,   127,  129,
                                    1000, 1023, 1024, 1025,  4095,  4096,  4097, 8191, 8192,
                                    8193, 8201, 9216, 12288, 20011, 25576, 32768};

// Elements past where tiles are aligned, and words of payloads.
constexpr std::pair<std::int64_t, std::int64_t> kShifts[] = {
    {0, 0}, {1, 1}, {5, 0}, {0, 3}, {8, 2}};

template <class Terms>
void emulate(const Compress1bit<Terms>& kernel, std::mt19937_64& generator) {
  using Kernel = Compress1bit<Terms>;
  emulate_grid(kernel, kernel.blocks(), Kernel::kThreads / kWarpLanes, Kernel::kSharedBytes,
               generator);
}

// Normal values over a few decades, zeros of both signs among them; sometimes one is not finite.
template <class T>
std::vector<T> values_of(std::size_t count, std::mt19937_64& generator) {
  std::vector<T> values = core::testing::normal_values<T>(generator, count);
  std::uniform_int_distribution<int> exponent(-12, 3);
  for (T& value : values) {
    float scaled = std::ldexp(core::to_float(value), exponent(generator));
    if (generator() % 64 == 0) scaled = generator() % 2 == 0 ? 0.0F : -0.0F;
    if (generator() % 30000 == 0) scaled = std::numeric_limits<float>::infinity();
    if (generator() % 30000 == 0) scaled = std::numeric_limits<float>::quiet_NaN();
    value = core::from_float<T>(scaled);
  }
  return values;
}

core::PayloadTarget target_of(const PayloadBuffer& buffer, std::int64_t number,
                              std::int64_t chunk_numel) {
  auto* words = reinterpret_cast<std::uint32_t*>(buffer.data() +
                                                 number * core::sign_payload_bytes(chunk_numel));
  return {words, reinterpret_cast<float*>(words + core::sign_words(chunk_numel))};
}

core::PayloadSource source_of(const PayloadBuffer& buffer, std::int64_t number,
                              std::int64_t chunk_numel) {
  const core::PayloadTarget found = target_of(buffer, number, chunk_numel);
  return {found.words, found.scales};
}

template <class T>
class CudaSignCompression : public ::testing::Test {
 protected:
  static constexpr std::int64_t kChunks = 3;

  // Buffers begin `shift` elements, and payloads `words` words, past where tiles are aligned.
  void compare(std::int64_t chunk_numel, std::int64_t shift, std::int64_t words) {
    const std::int64_t numel = kChunks * chunk_numel;
    const auto size = static_cast<std::size_t>(numel + shift);
    const std::vector<T> values = values_of<T>(size, generator_);
    std::vector<float> errors = values_of<float>(size, generator_);
    std::vector<float> own_errors = errors;
    const std::int64_t bytes = core::sign_payload_bytes(chunk_numel);
    const PayloadBuffer payloads(kChunks * bytes, words);
    const PayloadBuffer own_payloads(kChunks * bytes, words);
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::int64_t at = shift + chunk * chunk_numel;
      core::compress_1bit(values.data() + at, kTypeOf<T>, 0.3F, chunk_numel, errors.data() + at,
                          target_of(payloads, chunk, chunk_numel));
    }
    emulate(Compress1bit<SignValues<T>>{{values.data() + shift},
                                        0.3F,
                                        own_errors.data() + shift,
                                        own_payloads.data(),
                                        chunk_numel,
                                        kChunks},
            generator_);
    EXPECT_TRUE(own_payloads.same_words(payloads)) << chunk_numel << " elements, shift " << shift;
    EXPECT_TRUE(same_bits(own_errors, errors)) << chunk_numel << " elements, shift " << shift;
    for (const bool accumulate : {false, true}) expand(payloads, chunk_numel, shift, accumulate);
  }

  void expand(const PayloadBuffer& payloads, std::int64_t chunk_numel, std::int64_t shift,
              bool accumulate) {
    const auto size = static_cast<std::size_t>(kChunks * chunk_numel + shift);
    std::vector<T> out = core::testing::normal_values<T>(generator_, size);
    std::vector<T> own = out;
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      core::decompress_1bit(source_of(payloads, chunk, chunk_numel), chunk_numel, 1.7F, accumulate,
                            out.data() + shift + chunk * chunk_numel, kTypeOf<T>);
    }
    for (const std::int64_t warps : {1, 7}) {
      std::vector<T> found = own;
      emulate_launch(Decompress1bit<T>{payloads.data(), chunk_numel, kChunks, 1.7F, accumulate,
                                       found.data() + shift},
                     warps, generator_);
      EXPECT_TRUE(same_bits(found, out)) << chunk_numel << " elements, shift " << shift;
    }
  }

  std::mt19937_64 generator_ = fresh_generator();
};

using Types = ::testing::Types<float, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(CudaSignCompression, Types);

TYPED_TEST(CudaSignCompression, EveryLengthAndAlignmentYieldsTheBitsOfTheCpu) {
  for (const std::int64_t chunk_numel : kShares) {
    for (const auto& [shift, words] : kShifts) this->compare(chunk_numel, shift, words);
  }
}

// Sums of `count` payloads that begin `words` words past where tiles are aligned, and what is made
// of them in one pass; sums and errors begin `shift` elements past that.
void compare_sums(std::int64_t chunk_numel, std::int64_t count, std::int64_t shift,
                  std::int64_t words, std::mt19937_64& generator) {
  const std::int64_t bytes = core::sign_payload_bytes(chunk_numel);
  const PayloadBuffer payloads(count * bytes, words);
  std::vector<core::PayloadSource> sources;
  for (std::int64_t m = 0; m < count; ++m) {
    const std::vector<float> values =
        values_of<float>(static_cast<std::size_t>(chunk_numel), generator);
    std::vector<float> error(values.size());
    core::compress_1bit(values.data(), core::NumericType::float32, 1.0F, chunk_numel, error.data(),
                        target_of(payloads, m, chunk_numel));
    sources.push_back(source_of(payloads, m, chunk_numel));
  }
  std::vector<float> sum =
      values_of<float>(static_cast<std::size_t>(chunk_numel + shift), generator);
  std::vector<float> own_sum = sum;
  std::vector<float> error = values_of<float>(sum.size(), generator);
  std::vector<float> own_error = error;
  const SignPayloads of{payloads.data(), chunk_numel, count};
  core::sum_1bit(sources, 0, chunk_numel, 0.2F, count == 5, sum.data() + shift);
  emulate_launch(Sum1bit{of, 0.2F, count == 5, own_sum.data() + shift}, 3, generator);
  EXPECT_TRUE(same_bits(own_sum, sum)) << chunk_numel << " elements, " << count << " messages";
  const PayloadBuffer reduced(bytes, 0);
  const PayloadBuffer own_reduced(bytes, 0);
  core::reduce_1bit(sources, 0, chunk_numel, 0.2F, error.data() + shift,
                    target_of(reduced, 0, chunk_numel));
  emulate(
      Compress1bit<SignSum>{
          {of}, 0.2F, own_error.data() + shift, own_reduced.data(), chunk_numel, 1},
      generator);
  EXPECT_TRUE(own_reduced.same_words(reduced)) << chunk_numel << " elements, " << count;
  EXPECT_TRUE(same_bits(own_error, error)) << chunk_numel << " elements, " << count;
}

TEST(CudaSignSums, AreTheCpusInTheOrderOfThePayloads) {
  auto generator = fresh_generator();
  for (const std::int64_t chunk_numel : kShares) {
    for (const std::int64_t count : {1, 5}) compare_sums(chunk_numel, count, 0, 0, generator);
  }
}

// Four payloads at a time, and as many at once as lanes have scales.
TEST(CudaSignSums, EveryCountAndAlignmentYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const std::int64_t chunk_numel : {1024, 9216, 25576}) {
    for (const std::int64_t count : {2, 3, 4, 7, 8, 32, 33, 37, 68}) {
      for (const auto& [shift, words] : kShifts) {
        compare_sums(chunk_numel, count, shift, words, generator);
      }
    }
  }
}

// A tile's bits are stored by eight lanes, and go from four of each row to a word of each lane.
TEST(CudaSignWords, EveryBitOfATileHasItsPosition) {
  for (int element = 0; element < kSignTile; ++element) {
    LaneWords nibbles{};
    const int column = element % CompressTile::kRow;
    const int bit = element / CompressTile::kRow * 4 + column % 4;
    nibbles.at[column / 4] = 1U << bit;
    const LaneWords words = Compress1bit<SignSum>::words_of_nibbles(nibbles);
    alignas(kAccessBytes) std::uint32_t stored[kWarpLanes];
    store_lane_words(stored, words);
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      const std::uint32_t expected = lane == element / 32 ? 1U << (element % 32) : 0U;
      ASSERT_EQ(words.at[lane], expected) << "element " << element << ", lane " << lane;
      ASSERT_EQ(stored[lane], expected) << "element " << element << ", lane " << lane;
    }
  }
}

}  // namespace
}  // namespace zero_ext::cuda
