// An optimizer's step over one range, templated over rule, vector and element types.
//
// Kernel headers are included once per instruction set, inside that target's region; the unnamed
// namespace keeps each target's instantiations apart at link time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../base/numeric_types.h"
#include "../norm/non_finite.h"
#include "../simd/non_temporal_stores.h"
#include "optimizer_buffers.h"

namespace zero_ext::core {
namespace {

struct NoParam {};

template <class V, class Rule, class Moment, class Grad, class Param>
struct OptimizerLoop {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;
  static constexpr int kMoments = Rule::kMoments;
  using Coefficients = typename Rule::Coefficients;

  struct Pointers {
    float* master;
    Moment* moments[kMoments];
    const Grad* grad;
    Param* param;
    std::int32_t* non_finite;  // as of StepBuffers
  };

  // `poison` becomes NaN in lanes that get a value which is not finite, and stays zero in the
  // others: zero times such a value is NaN, and zero times any other is zero. The loop waits for
  // memory, so these two operations for each value cost no time.
  template <bool Streamed>
  static inline __attribute__((always_inline)) void vector(const Pointers& at, std::int64_t i,
                                                           const Coefficients& coefficients,
                                                           typename V::Float& poison) {
    typename V::Float values[1 + kMoments];
    values[0] = V::load(at.master + i);
    for (int m = 0; m < kMoments; ++m) values[1 + m] = V::load(at.moments[m] + i);
    Rule::template update<V>(values, V::load(at.grad + i), coefficients);
    for (int m = 0; m <= kMoments; ++m) poison = V::add(poison, V::mul(values[m], V::set(0.0F)));
    V::store(at.master + i, values[0]);
    for (int m = 0; m < kMoments; ++m) V::store(at.moments[m] + i, values[1 + m]);
    if constexpr (has_param) store_or_stream<V, Streamed>(at.param + i, values[0]);
  }

  // Fewer elements than a vector has go through one on the stack: the same rounding everywhere.
  static void partial(const Pointers& at, std::int64_t begin, std::int64_t end,
                      const Coefficients& coefficients, typename V::Float& poison) {
    float master[V::width] = {};
    Moment moments[kMoments][V::width] = {};
    Grad grad[V::width] = {};
    Param param[V::width] = {};
    Pointers own{master, {}, grad, param, nullptr};
    for (int m = 0; m < kMoments; ++m) own.moments[m] = moments[m];
    const std::int64_t count = end - begin;
    for (std::int64_t i = 0; i < count; ++i) {
      master[i] = at.master[begin + i];
      for (int m = 0; m < kMoments; ++m) moments[m][i] = at.moments[m][begin + i];
      grad[i] = at.grad[begin + i];
    }
    // Lanes behind the last element hold anything: without eps, zeros make NaN there.
    typename V::Float unused = V::set(0.0F);
    float poisons[V::width] = {};
    vector<false>(own, 0, coefficients, unused);
    for (std::int64_t i = 0; i < count; ++i) {
      poisons[i] = master[i] * 0.0F;
      for (int m = 0; m < kMoments; ++m) poisons[i] += to_float(moments[m][i]) * 0.0F;
      at.master[begin + i] = master[i];
      for (int m = 0; m < kMoments; ++m) at.moments[m][begin + i] = moments[m][i];
      if constexpr (has_param) at.param[begin + i] = param[i];
    }
    poison = V::add(poison, V::load(poisons));
  }

  static void report(const Pointers& at, typename V::Float poison) {
    float lanes[V::width];
    V::store(lanes, poison);
    bool finite = true;
    for (const float lane : lanes) finite = finite && lane == 0.0F;
    if (!finite && at.non_finite != nullptr) raise_flag(at.non_finite);
  }

  // For ranges that stay in the caches.
  static void range(const Pointers& at, const Coefficients& coefficients, std::int64_t begin,
                    std::int64_t end) {
    const Coefficients local = coefficients;
    typename V::Float poison = V::set(0.0F);
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) vector<false>(at, i, local, poison);
    if (i < end) partial(at, i, end, local, poison);
    report(at, poison);
  }

  static void run(const Pointers& at, const Coefficients& coefficients, std::int64_t begin,
                  std::int64_t end) {
    const Coefficients local = coefficients;
    std::int64_t i = begin;
    if constexpr (has_param) {
      if (end - begin >= kStreamedElements) {
        typename V::Float poison = V::set(0.0F);
        constexpr std::uintptr_t bytes = V::width * sizeof(Param);
        const auto past = reinterpret_cast<std::uintptr_t>(at.param + begin) % bytes;
        if (past != 0) {
          i += static_cast<std::int64_t>((bytes - past) / sizeof(Param));
          partial(at, begin, i, local, poison);
        }
        for (; i + V::width <= end; i += V::width) vector<true>(at, i, local, poison);
        V::fence();
        report(at, poison);
      }
    }
    range(at, local, i, end);
  }

  static void step(const StepBuffers& buffers, const Coefficients& coefficients, std::int64_t begin,
                   std::int64_t end) {
    Pointers at{buffers.master,
                {},
                static_cast<const Grad*>(buffers.grad),
                static_cast<Param*>(buffers.param),
                buffers.non_finite};
    for (int m = 0; m < kMoments; ++m) at.moments[m] = static_cast<Moment*>(buffers.moments[m]);
    run(at, coefficients, begin, end);
  }
};

}  // namespace
}  // namespace zero_ext::core
