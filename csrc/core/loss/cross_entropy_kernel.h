// The softmax of rows of logits. See optimizer_kernel.h on inclusion.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "../base/numeric_types.h"
#include "cross_entropy.h"

namespace zero_ext::core {
namespace {

template <class V, class T>
struct CrossEntropyRows {
  using Float = typename V::Float;
  static constexpr float kLog2E = 0x1.715476p0F;
  // Sums of every vector type have the same order, and so the same bits.
  static constexpr int kLanes = 16;
  static constexpr int kVectors = kLanes / V::width;
  static constexpr std::int64_t kBlock = 128 * kLanes;  // that float32 sums before float64

  // By exp(-2|a|), and below 1/4, where 1 - exp(-2|a|) would cancel, by its series to a^9.
  static Float tanh(Float a) {
    const Float size = V::abs(a);
    const Float decay = V::exp2(V::mul(size, V::set(-2 * kLog2E)));
    const Float large = V::div(V::sub(V::set(1.0F), decay), V::add(V::set(1.0F), decay));
    const Float square = V::mul(size, size);
    Float series = V::set(62.0F / 2835);
    series = V::fma(series, square, V::set(-17.0F / 315));
    series = V::fma(series, square, V::set(2.0F / 15));
    series = V::fma(series, square, V::set(-1.0F / 3));
    const Float small = V::fma(V::mul(series, square), size, size);
    return V::copy_sign(V::if_at_least(size, V::set(0.25F), large, small), a);
  }

  // A logit and, with a softcap, the derivative of the cap.
  struct Logit {
    Float value;
    Float slope;
  };
  template <bool Capped>
  static Logit logit(const T* source, float softcap) {
    const Float value = V::load(source);
    if constexpr (!Capped) return {value, V::set(1.0F)};
    const Float tangent = tanh(V::mul(value, V::set(1 / softcap)));
    const Float negative = V::mul(tangent, V::set(-1.0F));
    return {V::mul(tangent, V::set(softcap)), V::fma(negative, tangent, V::set(1.0F))};
  }

  static Float exponential(Float logit, float reference) {
    return V::exp2(V::mul(V::sub(logit, V::set(reference)), V::set(kLog2E)));
  }

  static double sum_of(const Float (&values)[kVectors]) {
    double sum = 0;
    for (const Float value : values) {
      float lanes[V::width];
      V::store(lanes, value);
      for (const float lane : lanes) sum += lane;
    }
    return sum;
  }

  // The vector at `source` with `count` elements, the others lowered to minus infinity.
  static void copy_tail(const T* source, std::int64_t count, T (&padded)[V::width]) {
    for (T& each : padded) each = from_float<T>(-std::numeric_limits<float>::infinity());
    std::memcpy(padded, source, static_cast<std::size_t>(count) * sizeof(T));
  }

  template <bool Capped>
  static float capped(const T* source, float softcap) {
    T padded[V::width];
    copy_tail(source, 1, padded);
    float lanes[V::width];
    V::store(lanes, logit<Capped>(padded, softcap).value);
    return lanes[0];
  }

  template <bool Capped>
  static void sum_row(const LogitRows& rows, const SoftmaxSums& sums, std::int64_t row) {
    const T* const logits = static_cast<const T*>(rows.logits) + row * rows.words;
    const float largest = sums.largest[row];
    double sum = 0;
    double rest = 0;
    std::int64_t i = 0;
    while (i + kLanes <= rows.words) {
      const std::int64_t left = (rows.words - i) / kLanes * kLanes;
      const std::int64_t end = i + (left < kBlock ? left : kBlock);
      Float exponentials[kVectors];
      Float differences[kVectors];
      for (int k = 0; k < kVectors; ++k) exponentials[k] = differences[k] = V::set(0.0F);
      for (; i < end; i += kLanes) {
        for (int k = 0; k < kVectors; ++k) {
          const Float value = logit<Capped>(logits + i + k * V::width, rows.softcap).value;
          exponentials[k] = V::add(exponentials[k], exponential(value, largest));
          differences[k] = V::add(differences[k], V::sub(value, V::set(largest)));
        }
      }
      sum += sum_of(exponentials);
      rest += sum_of(differences);
    }
    for (; i < rows.words; i += V::width) {
      const std::int64_t count = rows.words - i < V::width ? rows.words - i : V::width;
      T padded[V::width];
      copy_tail(logits + i, count, padded);
      const Float value = logit<Capped>(padded, rows.softcap).value;
      float lanes[2][V::width];
      V::store(lanes[0], exponential(value, largest));
      V::store(lanes[1], V::sub(value, V::set(largest)));
      for (std::int64_t lane = 0; lane < count; ++lane) {
        sum += lanes[0][lane];
        rest += lanes[1][lane];
      }
    }
    const std::int64_t label = rows.labels[row];
    const bool owned = label >= 0 && label < rows.words;
    sums.sum[row] = static_cast<float>(sum);
    sums.label[row] = owned ? capped<Capped>(logits + label, rows.softcap) - largest : 0.0F;
    sums.rest[row] = static_cast<float>(rest);
  }

  // The gradients of the logits at `source`, without that of the label.
  struct RowGradient {
    float largest;
    float scale;
    float uniform;
    float softcap;

    template <bool Capped>
    Float at(const T* source, float target) const {
      const Logit each = logit<Capped>(source, softcap);
      const Float weight = V::mul(exponential(each.value, largest), V::set(scale));
      const Float found = V::sub(V::sub(weight, V::set(uniform)), V::set(target));
      return Capped ? V::mul(found, each.slope) : found;
    }
  };

  template <bool Capped>
  static void differentiate_row(const LogitRows& rows, const SoftmaxGradient& gradient,
                                std::int64_t row) {
    T* const logits = static_cast<T*>(rows.logits) + row * rows.words;
    const RowGradient found{gradient.largest[row], gradient.scale[row], gradient.uniform[row],
                            rows.softcap};
    const std::int64_t label = rows.labels[row];
    const bool owned = label >= 0 && label < rows.words;
    T padded[V::width];
    T of_label{};
    if (owned) {
      copy_tail(logits + label, 1, padded);
      V::store(padded, found.template at<Capped>(padded, gradient.target[row]));
      of_label = padded[0];
    }
    std::int64_t i = 0;
    for (; i + V::width <= rows.words; i += V::width) {
      V::store(logits + i, found.template at<Capped>(logits + i, 0.0F));
    }
    if (i < rows.words) {
      copy_tail(logits + i, rows.words - i, padded);
      V::store(padded, found.template at<Capped>(padded, 0.0F));
      std::memcpy(logits + i, padded, static_cast<std::size_t>(rows.words - i) * sizeof(T));
    }
    if (owned) logits[label] = of_label;
  }

  static void sum(const LogitRows& rows, const SoftmaxSums& sums, std::int64_t begin,
                  std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (rows.softcap == 0) {
        sum_row<false>(rows, sums, row);
      } else {
        sum_row<true>(rows, sums, row);
      }
    }
  }

  static void differentiate(const LogitRows& rows, const SoftmaxGradient& gradient,
                            std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (rows.softcap == 0) {
        differentiate_row<false>(rows, gradient, row);
      } else {
        differentiate_row<true>(rows, gradient, row);
      }
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
