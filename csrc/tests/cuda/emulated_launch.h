// Runs a kernel object of csrc/cuda on the host: a grid of one dimension, thread after thread in a
// random order, so that a result which depends on the order or on the size of the grid shows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace zero_ext::testing {

template <class Kernel>
void emulate_launch(const Kernel& kernel, std::int64_t threads, std::mt19937_64& generator) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(threads));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::shuffle(order.begin(), order.end(), generator);
  for (const std::int64_t thread : order) kernel(thread, threads);
}

}  // namespace zero_ext::testing
