// Segments of an optimizer's step in a device's memory.
#pragma once

#include <cstdint>

#include "../../core/base/host_device.h"
#include "../../core/optimizers/optimizer_buffers.h"
#include "../common/error_recording.h"

namespace zero_ext::cuda {

// Reads segments, hyper-parameters and the gradients' scale from device memory, so that a captured
// graph sees new values. One block of threads runs it:
// if any of them finds a poison, all segments are empty, and the step changes nothing.
template <class Rule>
struct PrepareSegments {
  using Segment = core::OptimizerSegment<Rule>;

  DeviceOp op;
  DeviceErrorRecord* errors;
  const std::int64_t* bounds;  // [count, 2]
  const double* hyper;         // [count, Rule::kHyper]
  const float* gradient_scale;
  std::int64_t count;
  std::int64_t numel;
  Segment* segments;

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    bool refused = false;
    for (std::int64_t i = thread; i < count; i += threads) refused = is_refused(i) || refused;
    refused = any_of_block(refused);
    for (std::int64_t i = thread; i < count; i += threads) {
      segments[i] = refused
                        ? Segment{}
                        : core::prepare_segment<Rule>(bounds[2 * i], bounds[2 * i + 1],
                                                      hyper + Rule::kHyper * i, *gradient_scale);
    }
  }

  ZERO_EXT_HOST_DEVICE bool is_refused(std::int64_t i) const {
    const std::int64_t begin = bounds[2 * i];
    const std::int64_t end = bounds[2 * i + 1];
    const std::int64_t previous = i == 0 ? 0 : bounds[2 * i - 1];
    if (begin < previous) {
      return refuse(
          DeviceArgument::segments, i,
          {DeviceField::begin, static_cast<double>(begin), ExpectedValue::from_the_end_before});
    }
    if (end < begin || end > numel) {
      return refuse(
          DeviceArgument::segments, i,
          {DeviceField::end, static_cast<double>(end), ExpectedValue::from_begin_to_numel});
    }
    const auto error = core::hyperparameter_error<Rule>(hyper + Rule::kHyper * i);
    return error.field != DeviceField::none && refuse(DeviceArgument::hyper, i, error);
  }

 private:
  ZERO_EXT_HOST_DEVICE bool refuse(DeviceArgument argument, std::int64_t i,
                                   const core::HyperparameterError& error) const {
    record_error(errors, {op, argument, i, error.field, error.value, error.expected});
    return true;
  }
};

// The number of the first segment that ends behind an element; `count` if none does.
template <class Rule>
ZERO_EXT_HOST_DEVICE std::int64_t first_ending_after(const core::OptimizerSegment<Rule>* segments,
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
