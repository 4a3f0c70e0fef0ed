// Inputs shared by the tests that run optimizer steps of csrc/cuda on the host.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../../cuda/common/dispatch.h"
#include "../../../cuda/optimizers/segment_search.h"
#include "../../test_support.h"
#include "../emulated_launch.h"

namespace zero_ext::cuda::testing {

using core::NumericType;

constexpr NumericType kTypes[] = {NumericType::float32, NumericType::bfloat16,
                                  NumericType::float16};

// Bytes that start `shift` elements behind an address aligned for packs, and end with the
// allocation: a sanitizer sees any access past them.
class Buffer {
 public:
  Buffer(std::int64_t count, NumericType type, std::int64_t shift, std::mt19937_64& generator,
         bool positive = false)
      : offset_(static_cast<std::size_t>(shift * core::element_size(type))),
        bytes_(offset_ + static_cast<std::size_t>(count * core::element_size(type))) {
    std::normal_distribution<float> normal;
    with_type(type, [&]<class T>(std::type_identity<T>) {
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = normal(generator);
        const T element = core::from_float<T>(positive ? value * value : value);
        std::memcpy(bytes_.data() + offset_ + i * sizeof(T), &element, sizeof(T));
      }
    });
  }
  void* data() { return bytes_.data() + offset_; }
  bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }

 private:
  std::size_t offset_;
  std::vector<std::byte> bytes_;  // from operator new, which aligns to 16 bytes
};

// Segments as the op gets them, in tensors.
template <class Hyper>
struct Plan {
  using Segment = core::OptimizerSegment<typename Hyper::Coefficients>;

  std::vector<std::int64_t> bounds;
  std::vector<double> hyper;
  float scale = 0.37F;

  void add(std::int64_t begin, std::int64_t end, const std::vector<double>& row) {
    bounds.insert(bounds.end(), {begin, end});
    hyper.insert(hyper.end(), row.begin(), row.end());
  }
  std::int64_t count() const { return static_cast<std::int64_t>(bounds.size() / 2); }

  std::vector<Segment> prepared(std::int64_t numel) const {
    const auto [segments, error] = attempted(numel);
    EXPECT_EQ(error, "");
    return segments;
  }
  // With what the kernel records, whose result begins as nonsense.
  std::pair<std::vector<Segment>, std::string> attempted(std::int64_t numel) const {
    std::vector<Segment> result(bounds.size() / 2, {-5, 1 << 30, {}});
    DeviceErrorRecord record{};
    PrepareSegments<Hyper>{
        DeviceOp::adam_step, &record, bounds.data(), hyper.data(), &scale, count(), numel,
        result.data()}(0, 1);
    return {result, core::device_error_text(record)};
  }
};

// Sorted, disjoint segments with gaps, empty ones, and bounds inside of packs; some `longest`
// elements long. Each has one of the rows of hyper-parameters.
template <class Hyper>
Plan<Hyper> random_plan(std::int64_t numel, const std::vector<std::vector<double>>& rows,
                        std::mt19937_64& generator, std::uint64_t longest = 90) {
  Plan<Hyper> plan;
  std::int64_t at = 0;
  while (at < numel) {
    const auto gap = static_cast<std::int64_t>(generator() % 4 == 0 ? generator() % 13 : 0);
    const auto length =
        static_cast<std::int64_t>(generator() % (generator() % 2 == 0 ? 9 : longest));
    const std::int64_t begin = std::min(numel, at + gap);
    at = std::min(numel, begin + length);
    plan.add(begin, at, rows[generator() % rows.size()]);
  }
  return plan;
}

template <class Coefficients>
std::int64_t total_of(const std::vector<core::OptimizerSegment<Coefficients>>& segments) {
  std::int64_t total = 0;
  for (const auto& each : segments) total += each.end - each.begin;
  return total;
}

}  // namespace zero_ext::cuda::testing
