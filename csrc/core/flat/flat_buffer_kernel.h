// Kernels that copy, accumulate and sum flat ranges with a cast. See optimizer_kernel.h on
// inclusion.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "../dispatch/kernels.h"

namespace zero_ext::core {
namespace {

template <class V, class Target, class Source>
void copy_range(void* target, const void* source, std::int64_t count) {
  if constexpr (std::is_same_v<Target, Source>) {
    if (count > 0) std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(Target));
    return;
  }
  auto* to = static_cast<Target*>(target);
  const auto* from = static_cast<const Source*>(source);
  std::int64_t i = 0;
  for (; i + V::width <= count; i += V::width) V::store(to + i, V::load(from + i));
  for (; i < count; ++i) to[i] = from_float<Target>(to_float(from[i]));
}

template <class V, class Target, class Source>
void accumulate_range(void* target, const void* source, std::int64_t count) {
  auto* to = static_cast<Target*>(target);
  const auto* from = static_cast<const Source*>(source);
  std::int64_t i = 0;
  for (; i + V::width <= count; i += V::width) {
    V::store(to + i, V::add(V::load(to + i), V::load(from + i)));
  }
  for (; i < count; ++i) to[i] = from_float<Target>(to_float(to[i]) + to_float(from[i]));
}

template <class V, class Target, class Source>
void sum_range(void* target, std::span<const void* const> sources, std::int64_t begin,
               std::int64_t end, float scale, bool accumulate) {
  auto* to = static_cast<Target*>(target);
  std::int64_t i = begin;
  for (; i + V::width <= end; i += V::width) {
    typename V::Float sum = V::load(static_cast<const Source*>(sources[0]) + i);
    for (std::size_t k = 1; k < sources.size(); ++k) {
      sum = V::add(sum, V::load(static_cast<const Source*>(sources[k]) + i));
    }
    sum = V::mul(sum, V::set(scale));
    if (accumulate) sum = V::add(sum, V::load(to + i));
    V::store(to + i, sum);
  }
  for (; i < end; ++i) {
    float sum = to_float(static_cast<const Source*>(sources[0])[i]);
    for (std::size_t k = 1; k < sources.size(); ++k) {
      sum += to_float(static_cast<const Source*>(sources[k])[i]);
    }
    sum *= scale;
    if (accumulate) sum += to_float(to[i]);
    to[i] = from_float<Target>(sum);
  }
}

}  // namespace
}  // namespace zero_ext::core
