// Adam kernel over one range, templated over vector and element types.
//
// Kernel headers are included once per instruction set, inside that target's region; the unnamed
// namespace keeps each target's instantiations apart at link time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "adam.h"
#include "adam_formula.h"

namespace zero_ext::core {
namespace {

struct NoParam {};

template <class V, class Moment, class Grad, class Param>
struct AdamLoop {
  static constexpr bool has_param = !std::is_same_v<Param, NoParam>;

  struct Pointers {
    float* master;
    Moment* exp_avg;
    Moment* exp_avg_sq;
    const Grad* grad;
    Param* param;
  };

  static inline __attribute__((always_inline)) void vector(const Pointers& at, std::int64_t i,
                                                           const AdamFactors& factors) {
    const AdamValues<V> old{V::load(at.master + i), V::load(at.exp_avg + i),
                            V::load(at.exp_avg_sq + i)};
    const AdamValues<V> updated = adam_update<V>(old, V::load(at.grad + i), factors);
    V::store(at.master + i, updated.master);
    V::store(at.exp_avg + i, updated.exp_avg);
    V::store(at.exp_avg_sq + i, updated.exp_avg_sq);
    if constexpr (has_param) V::store(at.param + i, updated.master);
  }

  // The last few elements go through a full vector on the stack: the same rounding everywhere.
  static void tail(const Pointers& at, std::int64_t begin, std::int64_t end,
                   const AdamFactors& factors) {
    float master[V::width] = {};
    Moment exp_avg[V::width] = {};
    Moment exp_avg_sq[V::width] = {};
    Grad grad[V::width] = {};
    Param param[V::width] = {};
    const std::int64_t count = end - begin;
    for (std::int64_t i = 0; i < count; ++i) {
      master[i] = at.master[begin + i];
      exp_avg[i] = at.exp_avg[begin + i];
      exp_avg_sq[i] = at.exp_avg_sq[begin + i];
      grad[i] = at.grad[begin + i];
    }
    vector({master, exp_avg, exp_avg_sq, grad, param}, 0, factors);
    for (std::int64_t i = 0; i < count; ++i) {
      at.master[begin + i] = master[i];
      at.exp_avg[begin + i] = exp_avg[i];
      at.exp_avg_sq[begin + i] = exp_avg_sq[i];
      if constexpr (has_param) at.param[begin + i] = param[i];
    }
  }

  static void run(const AdamBuffers& buffers, const AdamFactors& factors, std::int64_t begin,
                  std::int64_t end) {
    const Pointers at{buffers.master, static_cast<Moment*>(buffers.exp_avg),
                      static_cast<Moment*>(buffers.exp_avg_sq),
                      static_cast<const Grad*>(buffers.grad), static_cast<Param*>(buffers.param)};
    const AdamFactors local = factors;
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) vector(at, i, local);
    if (i < end) tail(at, i, end, local);
  }
};

}  // namespace
}  // namespace zero_ext::core
