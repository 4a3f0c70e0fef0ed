#include <cmath>
#include <limits>

#include "../core/compression/signs.h"
#include "../cuda/compression/sign_kernel.h"
#include "cuda_message_support.h"
#include "emulated_launch.h"
#include "emulated_machine.h"
#include "test_support.h"

namespace zero_ext::cuda {
namespace {

using core::testing::fresh_generator;
using testing::emulate_grid;
using testing::emulate_launch;
using testing::kTypeOf;
using testing::Room;
using testing::same_bits;

// Elements of a part: less than a byte, a word, a pack or a block and a little more; and several
// blocks, the last of them short.
constexpr std::int64_t kShares[] = {0, 1, 7, 31, 33, 1000, 8192, 8201, 20011};

template <class Terms>
void emulate(const CompressSigns<Terms>& kernel, std::mt19937_64& generator) {
  using Kernel = CompressSigns<Terms>;
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

core::MessageTarget target_of(const Room& room, std::int64_t number, std::int64_t share) {
  auto* words =
      reinterpret_cast<std::uint32_t*>(room.data() + number * core::sign_message_bytes(share));
  return {words, reinterpret_cast<float*>(words + core::sign_words(share))};
}

core::MessageSource source_of(const Room& room, std::int64_t number, std::int64_t share) {
  const core::MessageTarget found = target_of(room, number, share);
  return {found.words, found.scales};
}

template <class T>
class CudaSigns : public ::testing::Test {
 protected:
  static constexpr std::int64_t kParts = 3;

  // Buffers begin `shift` elements, and messages as many words, past where packs are aligned.
  void compare(std::int64_t share, std::int64_t shift) {
    const std::int64_t numel = kParts * share;
    const auto size = static_cast<std::size_t>(numel + shift);
    const std::vector<T> values = values_of<T>(size, generator_);
    std::vector<float> errors = values_of<float>(size, generator_);
    std::vector<float> own_errors = errors;
    const std::int64_t bytes = core::sign_message_bytes(share);
    const Room messages(kParts * bytes, shift);
    const Room own_messages(kParts * bytes, shift);
    for (std::int64_t part = 0; part < kParts; ++part) {
      const std::int64_t at = shift + part * share;
      core::compress_signs(values.data() + at, kTypeOf<T>, 0.3F, share, errors.data() + at,
                           target_of(messages, part, share));
    }
    emulate(CompressSigns<SignValues<T>>{{values.data() + shift},
                                         0.3F,
                                         own_errors.data() + shift,
                                         own_messages.data(),
                                         share,
                                         kParts},
            generator_);
    EXPECT_TRUE(own_messages.same_words(messages)) << share << " elements, shift " << shift;
    EXPECT_TRUE(same_bits(own_errors, errors)) << share << " elements, shift " << shift;
    for (const bool accumulate : {false, true}) expand(messages, share, shift, accumulate);
  }

  void expand(const Room& messages, std::int64_t share, std::int64_t shift, bool accumulate) {
    const auto size = static_cast<std::size_t>(kParts * share + shift);
    std::vector<T> out = core::testing::normal_values<T>(generator_, size);
    std::vector<T> own = out;
    for (std::int64_t part = 0; part < kParts; ++part) {
      core::expand_signs(source_of(messages, part, share), share, 1.7F, accumulate,
                         out.data() + shift + part * share, kTypeOf<T>);
    }
    for (const std::int64_t threads : {1, 77}) {
      std::vector<T> found = own;
      emulate_launch(
          WriteSigns<T>{
              {messages.data(), share, 1}, kParts, 1.7F, accumulate, found.data() + shift},
          threads, generator_);
      EXPECT_TRUE(same_bits(found, out)) << share << " elements, shift " << shift;
    }
  }

  std::mt19937_64 generator_ = fresh_generator();
};

using Types = ::testing::Types<float, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(CudaSigns, Types);

TYPED_TEST(CudaSigns, EveryLengthAndAlignmentGivesTheBitsOfTheCpu) {
  for (const std::int64_t share : kShares) {
    for (const std::int64_t shift : {0, 1, 5}) this->compare(share, shift);
  }
}

// Sums of messages, and what is made of them in one pass.
TEST(CudaSignSums, AreTheCpusInTheOrderOfTheMessages) {
  auto generator = fresh_generator();
  for (const std::int64_t share : kShares) {
    for (const std::int64_t count : {1, 5}) {
      const std::int64_t bytes = core::sign_message_bytes(share);
      const Room messages(count * bytes, 0);
      std::vector<core::MessageSource> sources;
      for (std::int64_t m = 0; m < count; ++m) {
        const std::vector<float> values =
            values_of<float>(static_cast<std::size_t>(share), generator);
        std::vector<float> error(values.size());
        core::compress_signs(values.data(), core::NumericType::float32, 1.0F, share, error.data(),
                             target_of(messages, m, share));
        sources.push_back(source_of(messages, m, share));
      }
      std::vector<float> sum = values_of<float>(static_cast<std::size_t>(share), generator);
      std::vector<float> own_sum = sum;
      std::vector<float> error = values_of<float>(sum.size(), generator);
      std::vector<float> own_error = error;
      const bool accumulate = count == 5;
      core::sum_signs(sources, 0, share, 0.2F, accumulate, sum.data());
      emulate_launch(
          WriteSigns<float>{{messages.data(), share, count}, 1, 0.2F, accumulate, own_sum.data()},
          33, generator);
      EXPECT_TRUE(same_bits(own_sum, sum)) << share << " elements, " << count << " messages";
      const Room reduced(bytes, 0);
      const Room own_reduced(bytes, 0);
      core::reduce_signs(sources, 0, share, 0.2F, error.data(), target_of(reduced, 0, share));
      emulate(CompressSigns<SignSum>{{{messages.data(), share, count}},
                                     0.2F,
                                     own_error.data(),
                                     own_reduced.data(),
                                     share,
                                     1},
              generator);
      EXPECT_TRUE(own_reduced.same_words(reduced)) << share << " elements, " << count;
      EXPECT_TRUE(same_bits(own_error, error)) << share << " elements, " << count;
    }
  }
}

}  // namespace
}  // namespace zero_ext::cuda
