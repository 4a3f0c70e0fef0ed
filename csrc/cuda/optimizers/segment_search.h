// Segments of an optimizer's step in a device's memory.
#pragma once

#include <cstdint>

#include "../../core/portability.h"
#include "../../core/step_segment.h"
#include "../machine/fault.h"

namespace zero_ext::cuda {

// Reads segments, hyper-parameters and the gradients' scale from device memory, so that a captured
// graph sees new values. `Hyper` is of the kind of core::AdamHyper.
template <class Hyper>
struct PrepareSegments {
  using Segment = core::StepSegment<typename Hyper::Factors>;

  const std::int64_t* bounds;  // [count, 2]
  const double* hyper;         // [count, Hyper::kCount]
  const float* gradient_scale;
  std::int64_t count;
  std::int64_t numel;
  Segment* segments;

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    for (std::int64_t i = thread; i < count; i += threads) prepare(i);
  }

  ZERO_EXT_HOST_DEVICE void prepare(std::int64_t i) const {
    const std::int64_t begin = bounds[2 * i];
    const std::int64_t end = bounds[2 * i + 1];
    const std::int64_t previous = i == 0 ? 0 : bounds[2 * i - 1];
    if (begin < previous) {
      fail(Hyper::step(), "segments", i, "begin", static_cast<double>(begin),
           "at least the end of the segment before, or zero");
    }
    if (end < begin || end > numel) {
      fail(Hyper::step(), "segments", i, "end", static_cast<double>(end),
           "between the segment's begin and the number of elements");
    }
    const double* row = hyper + Hyper::kCount * i;
    const core::HyperFault fault = Hyper::fault(row);
    if (fault.name != nullptr)
      fail(Hyper::step(), "hyper", i, fault.name, fault.value, fault.wanted);
    segments[i] = core::prepared_segment<Hyper>(begin, end, row, *gradient_scale);
  }
};

// The number of the first segment that ends behind an element; `count` if none does.
template <class Factors>
ZERO_EXT_HOST_DEVICE std::int64_t first_ending_after(const core::StepSegment<Factors>* segments,
                                                     std::int64_t count, std::int64_t element) {
  std::int64_t low = 0;
  std::int64_t high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (segments[middle].end > element) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace zero_ext::cuda
