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

// Ranges of this many elements do not stay in a core's caches: parameters are then stored past
// them, which spares reading what is about to be overwritten (measured: 9% of the step).
inline constexpr std::int64_t kStreamedElements = std::int64_t{1} << 18;

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

  template <bool Streamed>
  static inline __attribute__((always_inline)) void vector(const Pointers& at, std::int64_t i,
                                                           const AdamFactors& factors) {
    const AdamValues<V> old{V::load(at.master + i), V::load(at.exp_avg + i),
                            V::load(at.exp_avg_sq + i)};
    const AdamValues<V> updated = adam_update<V>(old, V::load(at.grad + i), factors);
    V::store(at.master + i, updated.master);
    V::store(at.exp_avg + i, updated.exp_avg);
    V::store(at.exp_avg_sq + i, updated.exp_avg_sq);
    if constexpr (has_param) {
      if constexpr (Streamed) {
        V::stream(at.param + i, updated.master);
      } else {
        V::store(at.param + i, updated.master);
      }
    }
  }

  // Fewer elements than a vector has go through one on the stack: the same rounding everywhere.
  static void partial(const Pointers& at, std::int64_t begin, std::int64_t end,
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
    vector<false>({master, exp_avg, exp_avg_sq, grad, param}, 0, factors);
    for (std::int64_t i = 0; i < count; ++i) {
      at.master[begin + i] = master[i];
      at.exp_avg[begin + i] = exp_avg[i];
      at.exp_avg_sq[begin + i] = exp_avg_sq[i];
      if constexpr (has_param) at.param[begin + i] = param[i];
    }
  }

  static void range(const Pointers& at, const AdamFactors& factors, std::int64_t begin,
                    std::int64_t end) {
    const AdamFactors local = factors;
    std::int64_t i = begin;
    for (; i + V::width <= end; i += V::width) vector<false>(at, i, local);
    if (i < end) partial(at, i, end, local);
  }

  static void run(const AdamBuffers& buffers, const AdamFactors& factors, std::int64_t begin,
                  std::int64_t end) {
    const Pointers at{buffers.master, static_cast<Moment*>(buffers.exp_avg),
                      static_cast<Moment*>(buffers.exp_avg_sq),
                      static_cast<const Grad*>(buffers.grad), static_cast<Param*>(buffers.param)};
    const AdamFactors local = factors;
    std::int64_t i = begin;
    if constexpr (has_param) {
      if (end - begin >= kStreamedElements) {
        constexpr std::uintptr_t bytes = V::width * sizeof(Param);
        const auto past = reinterpret_cast<std::uintptr_t>(at.param + begin) % bytes;
        if (past != 0) {
          i += static_cast<std::int64_t>((bytes - past) / sizeof(Param));
          partial(at, begin, i, local);
        }
        for (; i + V::width <= end; i += V::width) vector<true>(at, i, local);
        V::fence();
      }
    }
    range(at, local, i, end);
  }
};

}  // namespace
}  // namespace zero_ext::core
