// The norms of LAMB over one range of its buffers. See optimizer_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../norm/squared_norm_kernel.h"
#include "lamb_norms.h"
#include "lamb_rule.h"

namespace zero_ext::core {
namespace {

template <class V, class Moment, class Grad>
struct LambNormLoop {
  using Norm = SquaredNorm<V, float>;
  using Coefficients = CoefficientsOf<LambRule>;

  struct Pointers {
    const float* master;
    const Moment* exp_avg;
    const Moment* exp_avg_sq;
    const Grad* grad;
  };

  static inline __attribute__((always_inline)) void vector(const Pointers& at, std::int64_t i,
                                                           const Coefficients& coefficients,
                                                           float* direction) {
    typename V::Float values[1 + LambRule::kMoments] = {
        V::load(at.master + i), V::load(at.exp_avg + i), V::load(at.exp_avg_sq + i)};
    V::store(direction, LambRule::direction<V>(values, V::load(at.grad + i), coefficients));
  }

  // Fewer elements than a vector has go through one on the stack, as in OptimizerLoop.
  static void partial(const Pointers& at, std::int64_t begin, std::int64_t count,
                      const Coefficients& coefficients, float* directions) {
    float master[V::width] = {};
    Moment exp_avg[V::width] = {};
    Moment exp_avg_sq[V::width] = {};
    Grad grad[V::width] = {};
    float direction[V::width];
    std::copy_n(at.master + begin, count, master);
    std::copy_n(at.exp_avg + begin, count, exp_avg);
    std::copy_n(at.exp_avg_sq + begin, count, exp_avg_sq);
    std::copy_n(at.grad + begin, count, grad);
    vector({master, exp_avg, exp_avg_sq, grad}, 0, coefficients, direction);
    std::copy_n(direction, count, directions);
  }

  // The directions of a block stay in the caches between the two loops.
  static void run(const StepBuffers& buffers, const Coefficients& coefficients, std::int64_t begin,
                  std::int64_t end, LambNorms& total) {
    const Pointers at{buffers.master, static_cast<const Moment*>(buffers.moments[0]),
                      static_cast<const Moment*>(buffers.moments[1]),
                      static_cast<const Grad*>(buffers.grad)};
    const Coefficients local = coefficients;
    alignas(64) float directions[Norm::kBlock];
    for (std::int64_t block = begin; block < end; block += Norm::kBlock) {
      const std::int64_t count = std::min(Norm::kBlock, end - block);
      std::int64_t i = 0;
      for (; i + V::width <= count; i += V::width) vector(at, block + i, local, directions + i);
      if (i < count) partial(at, block + i, count - i, local, directions + i);
      Norm::run(at.master + block, count, total.weights);
      Norm::run(directions, count, total.updates);
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
