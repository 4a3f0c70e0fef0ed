// Helpers shared by the C++ tests: types, instruction sets, seeded random input, splitting over
// threads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "../core/base/numeric_types.h"
#include "../core/simd/isa.h"

namespace zero_ext::core::testing {

template <class T>
inline constexpr NumericType kTypeOf = NumericType::float32;
template <>
inline constexpr NumericType kTypeOf<BFloat16> = NumericType::bfloat16;
template <>
inline constexpr NumericType kTypeOf<Float16> = NumericType::float16;

inline std::vector<Isa> available_isas() {
  std::vector<Isa> result;
  for (const Isa isa : kAllIsas) {
    if (has_isa(isa)) result.push_back(isa);
  }
  return result;
}

// Selects an instruction set and puts the widest one back.
class SelectedIsa {
 public:
  explicit SelectedIsa(Isa isa) { EXPECT_TRUE(select_isa(isa)); }
  ~SelectedIsa() { select_isa(widest_isa()); }
  SelectedIsa(const SelectedIsa&) = delete;
  SelectedIsa& operator=(const SelectedIsa&) = delete;
};

// A generator with a fresh seed, which is printed.
inline std::mt19937_64 fresh_generator() {
  const std::uint64_t seed = std::random_device{}();
  std::cout << "random seed " << seed << std::endl;
  return std::mt19937_64(seed);
}

template <class T>
std::vector<T> normal_values(std::mt19937_64& generator, std::size_t count,
                             float deviation = 1.0F) {
  std::normal_distribution<float> distribution(0.0F, deviation);
  std::vector<T> values(count);
  for (T& value : values) value = from_float<T>(distribution(generator));
  return values;
}

// Calls work(begin, end) on `threads` threads with uneven parts of [0, count).
template <class Work>
void split_over_threads(std::int64_t count, int threads, const Work& work) {
  std::vector<std::jthread> running;
  std::int64_t begin = 0;
  for (int i = 1; i <= threads; ++i) {
    const std::int64_t end =
        i == threads ? count : std::min(count, begin + count * i / (threads * (threads + 1) / 2));
    running.emplace_back([&work, begin, end] { work(begin, end); });
    begin = end;
  }
}

}  // namespace zero_ext::core::testing
