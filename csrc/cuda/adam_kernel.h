// One-pass Adam / AdamW as a thread of a grid runs it.
//
// Kernels are function objects called with a thread's number and the number of threads, so that
// the host can run them too. They give the same result for every size of the grid.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../core/adam.h"
#include "../core/adam_factors_formula.h"
#include "../core/adam_formula.h"
#include "../core/vector_scalar.h"
#include "fault.h"
#include "pack.h"

namespace zero_ext::cuda {

using core::AdamFactors;
using core::AdamSegment;

// Reads segments, hyper-parameters and the gradients' scale from device memory, so that a captured
// graph sees new values. A scale that is not finite (gradients overflowed) leaves every segment
// empty: the step changes nothing.
struct PrepareAdamSegments {
  const std::int64_t* bounds;  // [count, 2]
  const double* hyper;         // [count, core::kAdamHyperParameters]
  const float* gradient_scale;
  std::int64_t count;
  std::int64_t numel;
  AdamSegment* segments;

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    for (std::int64_t i = thread; i < count; i += threads) prepare(i);
  }

  ZERO_EXT_HOST_DEVICE void prepare(std::int64_t i) const {
    const std::int64_t begin = bounds[2 * i];
    const std::int64_t end = bounds[2 * i + 1];
    const std::int64_t previous = i == 0 ? 0 : bounds[2 * i - 1];
    if (begin < previous) {
      fail("an Adam step", "segments", i, "begin", static_cast<double>(begin),
           "at least the end of the segment before, or zero");
    }
    if (end < begin || end > numel) {
      fail("an Adam step", "segments", i, "end", static_cast<double>(end),
           "between the segment's begin and the number of elements");
    }
    const double* row = hyper + core::kAdamHyperParameters * i;
    const core::AdamHyperFault fault = core::adam_hyper_fault(row);
    if (fault.name != nullptr)
      fail("an Adam step", "hyper", i, fault.name, fault.value, fault.wanted);
    const float scale = *gradient_scale;
    segments[i] = {core::is_finite(scale) ? begin : end, end,
                   core::adam_factors_formula(core::adam_hyper_parameters(row), scale)};
  }
};

struct NoParam {};

template <class Moment, class Grad, class Param>
struct AdamStep {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;
  using Scalar = core::ScalarVector;

  float* master;
  Moment* exp_avg;
  Moment* exp_avg_sq;
  const Grad* grad;
  Param* param;
  std::int64_t numel;
  const AdamSegment* segments;
  std::int64_t segment_count;
  bool aligned;  // all buffers start at multiples of kAccessBytes

  static AdamStep of(const core::AdamBuffers& buffers, std::int64_t numel,
                     const AdamSegment* segments, std::int64_t segment_count) {
    const bool aligned = is_aligned(buffers.master) && is_aligned(buffers.exp_avg) &&
                         is_aligned(buffers.exp_avg_sq) && is_aligned(buffers.grad) &&
                         is_aligned(buffers.param);
    return {buffers.master,
            static_cast<Moment*>(buffers.exp_avg),
            static_cast<Moment*>(buffers.exp_avg_sq),
            static_cast<const Grad*>(buffers.grad),
            static_cast<Param*>(buffers.param),
            numel,
            segments,
            segment_count,
            aligned};
  }

  std::int64_t packs() const { return (numel + kPackElements - 1) / kPackElements; }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    AdamSegment current{};  // in registers: most threads never leave one segment
    for (std::int64_t begin = thread * kPackElements; begin < numel;
         begin += threads * kPackElements) {
      const std::int64_t end = begin + kPackElements;
      if (current.begin <= begin && end <= current.end) {
        whole(begin, current.factors);
      } else {
        search(begin, end, current);
      }
    }
  }

  // Updates what the segments hold of [begin, end); leaves the last of them in `current`.
  ZERO_EXT_HOST_DEVICE void search(std::int64_t begin, std::int64_t end,
                                   AdamSegment& current) const {
    for (std::int64_t i = first_ending_after(begin); i < segment_count; ++i) {
      if (segments[i].begin >= end) return;
      current = segments[i];
      const std::int64_t first = current.begin > begin ? current.begin : begin;
      const std::int64_t last = current.end < end ? current.end : end;
      if (last - first == kPackElements) {
        whole(first, current.factors);
      } else {
        elements(first, last, current.factors);
      }
    }
  }

  ZERO_EXT_HOST_DEVICE std::int64_t first_ending_after(std::int64_t element) const {
    std::int64_t low = 0;
    std::int64_t high = segment_count;
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

  // A whole pack of one segment.
  ZERO_EXT_HOST_DEVICE void whole(std::int64_t begin, const AdamFactors& factors) const {
    if (!aligned) return elements(begin, begin + kPackElements, factors);
    Pack<float> masters = load_pack(master + begin);
    Pack<Moment> averages = load_pack(exp_avg + begin);
    Pack<Moment> squares = load_pack(exp_avg_sq + begin);
    const Pack<Grad> gradients = load_pack(grad + begin);
    Pack<Param> params;
    ZERO_EXT_UNROLL
    for (int k = 0; k < kPackElements; ++k) {
      update(masters.values[k], averages.values[k], squares.values[k], gradients.values[k],
             params.values[k], factors);
    }
    store_pack(master + begin, masters);
    store_pack(exp_avg + begin, averages);
    store_pack(exp_avg_sq + begin, squares);
    if constexpr (has_param) store_pack(param + begin, params);
  }

  ZERO_EXT_HOST_DEVICE void elements(std::int64_t begin, std::int64_t end,
                                     const AdamFactors& factors) const {
    for (std::int64_t i = begin; i < end; ++i) {
      Param unused;
      Param* target = &unused;
      if constexpr (has_param) target = param + i;
      update(master[i], exp_avg[i], exp_avg_sq[i], grad[i], *target, factors);
    }
  }

  ZERO_EXT_HOST_DEVICE static void update(float& master, Moment& exp_avg, Moment& exp_avg_sq,
                                          Grad grad, [[maybe_unused]] Param& param,
                                          const AdamFactors& factors) {
    const core::AdamValues<Scalar> updated = core::adam_update<Scalar>(
        {Scalar::load(&master), Scalar::load(&exp_avg), Scalar::load(&exp_avg_sq)},
        Scalar::load(&grad), factors);
    Scalar::store(&master, updated.master);
    Scalar::store(&exp_avg, updated.exp_avg);
    Scalar::store(&exp_avg_sq, updated.exp_avg_sq);
    if constexpr (has_param) Scalar::store(&param, updated.master);
  }
};

}  // namespace zero_ext::cuda
