// An optimizer's step over flat buffers, as a thread of a grid runs it.
//
// Kernels are function objects called with a thread's number and the number of threads, so that
// the host can run them too. They give the same result for every size of the grid.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../core/vector_scalar.h"
#include "../machine/vector_access.h"
#include "segment_search.h"

namespace zero_ext::cuda {

struct NoParam {};

// Buffers of equal element count, typed; param is null where Param is NoParam. Rules are described
// in core/step_kernel.h.
template <class Rule, class Moment, class Grad, class Param>
struct StepPointers {
  float* master;
  Moment* moments[Rule::kMoments];
  const Grad* grad;
  Param* param;
  std::int32_t* non_finite;  // raised if a new master weight or moment is not finite; may be null

  // Whether all start at multiples of kAccessBytes.
  bool aligned() const {
    bool result = is_aligned(master) && is_aligned(grad) && is_aligned(param);
    for (const Moment* moment : moments) result = result && is_aligned(moment);
    return result;
  }
};

// One element. `fault` becomes NaN if a new value is not finite, and stays as it is otherwise.
template <class Rule, class Moment, class Grad, class Param>
ZERO_EXT_HOST_DEVICE void update_element(float& master, Moment* const (&moments)[Rule::kMoments],
                                         Grad grad, [[maybe_unused]] Param& param,
                                         const typename Rule::Factors& factors, float& fault) {
  using Scalar = core::ScalarVector;
  float values[1 + Rule::kMoments];
  values[0] = Scalar::load(&master);
  ZERO_EXT_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m) values[1 + m] = Scalar::load(moments[m]);
  Rule::template update<Scalar>(values, Scalar::load(&grad), factors);
  ZERO_EXT_UNROLL
  for (int m = 0; m <= Rule::kMoments; ++m) fault += values[m] * 0.0F;
  Scalar::store(&master, values[0]);
  ZERO_EXT_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m) Scalar::store(moments[m], values[1 + m]);
  if constexpr (!std::is_same_v<Param, NoParam>) Scalar::store(&param, values[0]);
}

// At the end of a thread's work. Threads that raise a flag write the same value.
ZERO_EXT_HOST_DEVICE void report(float fault, std::int32_t* non_finite) {
  if (fault != 0.0F && non_finite != nullptr) *non_finite = 1;
}

template <class Rule, class Moment, class Grad, class Param>
struct FlatStep {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;
  static constexpr int kMoments = Rule::kMoments;
  using Factors = typename Rule::Factors;
  using Segment = core::StepSegment<Factors>;

  StepPointers<Rule, Moment, Grad, Param> at;
  std::int64_t numel;
  const Segment* segments;
  std::int64_t segment_count;
  bool aligned;

  FlatStep(const StepPointers<Rule, Moment, Grad, Param>& pointers, std::int64_t elements,
           const Segment* parts, std::int64_t count)
      : at(pointers),
        numel(elements),
        segments(parts),
        segment_count(count),
        aligned(pointers.aligned()) {}

  std::int64_t packs() const { return (numel + kPackElements - 1) / kPackElements; }

  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    Segment current{};  // in registers: most threads never leave one segment
    float fault = 0.0F;
    for (std::int64_t begin = thread * kPackElements; begin < numel;
         begin += threads * kPackElements) {
      const std::int64_t end = begin + kPackElements;
      if (current.begin <= begin && end <= current.end) {
        whole(begin, current.factors, fault);
      } else {
        search(begin, end, current, fault);
      }
    }
    report(fault, at.non_finite);
  }

  // Updates what the segments hold of [begin, end); leaves the last of them in `current`.
  ZERO_EXT_HOST_DEVICE void search(std::int64_t begin, std::int64_t end, Segment& current,
                                   float& fault) const {
    for (std::int64_t i = first_ending_after(segments, segment_count, begin); i < segment_count;
         ++i) {
      if (segments[i].begin >= end) return;
      current = segments[i];
      const std::int64_t first = current.begin > begin ? current.begin : begin;
      const std::int64_t last = current.end < end ? current.end : end;
      if (last - first == kPackElements) {
        whole(first, current.factors, fault);
      } else {
        elements(first, last, current.factors, fault);
      }
    }
  }

  // A whole pack of one segment.
  ZERO_EXT_HOST_DEVICE void whole(std::int64_t begin, const Factors& factors, float& fault) const {
    if (!aligned) return elements(begin, begin + kPackElements, factors, fault);
    Pack<float> masters = load_pack(at.master + begin);
    Pack<Moment> moments[kMoments];
    ZERO_EXT_UNROLL
    for (int m = 0; m < kMoments; ++m) moments[m] = load_pack(at.moments[m] + begin);
    const Pack<Grad> gradients = load_pack(at.grad + begin);
    Pack<Param> params;
    ZERO_EXT_UNROLL
    for (int k = 0; k < kPackElements; ++k) {
      Moment* own[kMoments];
      ZERO_EXT_UNROLL
      for (int m = 0; m < kMoments; ++m) own[m] = &moments[m].values[k];
      update_element<Rule>(masters.values[k], own, gradients.values[k], params.values[k], factors,
                           fault);
    }
    store_pack(at.master + begin, masters);
    ZERO_EXT_UNROLL
    for (int m = 0; m < kMoments; ++m) store_pack(at.moments[m] + begin, moments[m]);
    if constexpr (has_param) store_pack(at.param + begin, params);
  }

  ZERO_EXT_HOST_DEVICE void elements(std::int64_t begin, std::int64_t end, const Factors& factors,
                                     float& fault) const {
    for (std::int64_t i = begin; i < end; ++i) {
      Param unused;
      Param* target = &unused;
      if constexpr (has_param) target = at.param + i;
      Moment* own[kMoments];
      ZERO_EXT_UNROLL
      for (int m = 0; m < kMoments; ++m) own[m] = at.moments[m] + i;
      update_element<Rule>(at.master[i], own, at.grad[i], *target, factors, fault);
    }
  }
};

}  // namespace zero_ext::cuda
