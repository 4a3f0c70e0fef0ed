// The extremes of blocks' elements, which give their scales. See optimizer_kernel.h on inclusion.
//
// A range is of one block, per lane: read() gives a vector of `lanes` elements, include() takes
// some of them. Its extremes are integers in the order of the values, of which infinities and NaNs
// are the extremes; those of 16-bit values are in the upper half of a lane of 32 bits.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../base/numeric_types.h"
#include "integer_block_formula.h"

namespace zero_ext::core {
namespace {

// The lower ones of two vectors' elements of type T, or the higher ones.
template <class V, class T>
struct Lower {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  inline __attribute__((always_inline)) Float operator()(Float a, Float b) const {
    return V::min(a, b);
  }
  inline __attribute__((always_inline)) Bits operator()(Bits a, Bits b) const {
    return V::template min<T>(a, b);
  }
};

template <class V, class T>
struct Higher {
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  inline __attribute__((always_inline)) Float operator()(Float a, Float b) const {
    return V::max(a, b);
  }
  inline __attribute__((always_inline)) Bits operator()(Bits a, Bits b) const {
    return V::template max<T>(a, b);
  }
};

template <class V>
struct HigherMagnitude {
  using Float = typename V::Float;
  inline __attribute__((always_inline)) Float operator()(Float a, Float b) const {
    return V::max_magnitude(a, b);
  }
};

// `Count` vectors, a power of two, to one.
template <int Count, class Vector, class Operation>
inline __attribute__((always_inline)) Vector fold(const Vector* each, const Operation& both) {
  if constexpr (Count == 1) {
    return each[0];
  } else {
    return both(fold<Count / 2>(each, both), fold<Count / 2>(each + Count / 2, both));
  }
}

// The higher, or with Lower the lower, of what shares a lane of 32 bits.
template <template <class, class> class Operation, class V, class T>
inline __attribute__((always_inline)) typename V::Bits to_words(typename V::Bits value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return Operation<V, float>()(V::low_halves(value), V::high_halves(value));
  }
}

// Of symmetric formats: the bit patterns of magnitudes.
template <class V, class Code, class T>
struct MagnitudeExtremes {
  using Bits = typename V::Bits;
  Bits highest;

  static BlockScales<V> scales(const MagnitudeExtremes (&blocks)[V::width]) {
    Bits highest[V::width];
    for (int b = 0; b < V::width; ++b) highest[b] = blocks[b].highest;
    return Code::template scales_of_magnitude<V>(
        V::template value_of_upper<T>(V::across(highest, Higher<V, float>())));
  }
};

template <class V, class Code, class T>
struct MagnitudeRange {
  using Vector = typename V::Bits;
  using Extremes = MagnitudeExtremes<V, Code, T>;
  static constexpr int lanes = V::template lanes<T>;
  Vector magnitude;

  MagnitudeRange() : magnitude(V::template set_bits<T>(0)) {}
  static Vector read(const T* source) { return V::magnitudes(source); }

  template <int Count>
  inline __attribute__((always_inline)) void include(const Vector (&some)[Count]) {
    const Higher<V, T> higher;
    magnitude = higher(magnitude, fold<Count>(some, higher));
  }
  Extremes extremes() const { return {to_words<Higher, V, T>(magnitude)}; }
};

// Of asymmetric formats.
template <class V, class Code, class T>
struct OrderedExtremes {
  using Bits = typename V::Bits;
  Bits lowest;
  Bits highest;

  static BlockScales<V> scales(const OrderedExtremes (&blocks)[V::width]) {
    Bits lowest[V::width];
    Bits highest[V::width];
    for (int b = 0; b < V::width; ++b) {
      lowest[b] = blocks[b].lowest;
      highest[b] = blocks[b].highest;
    }
    return Code::template scales_of_range<V>(value_of(V::across(lowest, Lower<V, float>())),
                                             value_of(V::across(highest, Higher<V, float>())),
                                             V::set(0.0F));
  }

 private:
  static typename V::Float value_of(Bits ordered) {
    return V::template value_of_upper<T>(V::unordered(ordered));
  }
};

// Of elements of 16 bits.
template <class V, class Code, class T>
struct OrderedRange {
  using Vector = typename V::Bits;
  using Extremes = OrderedExtremes<V, Code, T>;
  static constexpr int lanes = V::template lanes<T>;
  Vector lowest;
  Vector highest;

  OrderedRange() : lowest(V::template set_bits<T>(0xFFFFU)), highest(V::template set_bits<T>(0)) {}
  static Vector read(const T* source) { return V::ordered(source); }

  template <int Count>
  inline __attribute__((always_inline)) void include(const Vector (&some)[Count]) {
    const Lower<V, T> lower;
    const Higher<V, T> higher;
    lowest = lower(lowest, fold<Count>(some, lower));
    highest = higher(highest, fold<Count>(some, higher));
  }
  Extremes extremes() const {
    return {to_words<Lower, V, T>(lowest), to_words<Higher, V, T>(highest)};
  }
};

// Of float32 where no element is NaN, in a symmetric format.
template <class V, class Code>
struct NumberMagnitudes {
  using Vector = typename V::Float;
  using Extremes = MagnitudeExtremes<V, Code, float>;
  Vector highest;

  NumberMagnitudes() : highest(V::set(0.0F)) {}

  template <int Count>
  inline __attribute__((always_inline)) void include(const Vector (&some)[Count]) {
    const HigherMagnitude<V> higher;
    highest = higher(highest, fold<Count>(some, higher));
  }
  Extremes extremes() const { return {V::magnitudes_of(highest)}; }
};

// And in an asymmetric one.
template <class V, class Code>
struct NumberRange {
  using Vector = typename V::Float;
  using Extremes = OrderedExtremes<V, Code, float>;
  Vector lowest;
  Vector highest;

  NumberRange()
      : lowest(V::set(std::numeric_limits<float>::infinity())),
        highest(V::set(-std::numeric_limits<float>::infinity())) {}

  template <int Count>
  inline __attribute__((always_inline)) void include(const Vector (&some)[Count]) {
    const Lower<V, float> lower;
    const Higher<V, float> higher;
    lowest = lower(lowest, fold<Count>(some, lower));
    highest = higher(highest, fold<Count>(some, higher));
  }
  Extremes extremes() const { return {V::ordered_of(lowest), V::ordered_of(highest)}; }
};

template <class V, class Code>
using SumRange =
    std::conditional_t<Code::kIsSymmetric, NumberMagnitudes<V, Code>, NumberRange<V, Code>>;

// Of float32. Comparisons may lose a NaN, the sum of the elements times zero does not.
template <class V, class Code>
struct FloatRange : NumberRange<V, Code> {
  using Base = NumberRange<V, Code>;
  using Vector = typename V::Float;
  static constexpr int lanes = V::width;
  Vector zero;

  FloatRange() : zero(V::set(0.0F)) {}
  static Vector read(const float* source) { return V::load(source); }

  template <int Count>
  inline __attribute__((always_inline)) void include(const Vector (&some)[Count]) {
    Base::include(some);
    for (const Vector value : some) zero = V::fma(value, V::set(0.0F), zero);
  }
  // A NaN's sign decides which of the two shows it.
  typename Base::Extremes extremes() const {
    return {V::ordered_of(V::add(Base::lowest, zero)), V::ordered_of(V::add(Base::highest, zero))};
  }
};

// The magnitudes of some scales; zeros are left out of the lowest.
template <class V>
class Magnitudes {
 public:
  Magnitudes()
      : before_lowest_(V::template set_bits<float>(0xFFFFFFFFU)),
        highest_(V::template set_bits<float>(0)) {}
  void include(const float* source) {
    const auto magnitudes = V::magnitudes(source);
    highest_ = V::template max<float>(highest_, magnitudes);
    before_lowest_ =
        V::template min<float>(before_lowest_, V::template decrement<float>(magnitudes));
  }
  bool are_between(float least, float most) const {
    return V::template lowest<float>(before_lowest_) >= std::bit_cast<std::uint32_t>(least) - 1 &&
           V::template highest<float>(highest_) <= std::bit_cast<std::uint32_t>(most);
  }

 private:
  typename V::Bits before_lowest_;
  typename V::Bits highest_;
};

// The scales of as many blocks as a vector has lanes, found at once.
template <class V, class Extremes>
class GroupScales {
 public:
  GroupScales() : extremes_{}, scale_{}, lowest_{}, inverse_{} {}
  void set(std::int64_t b, const Extremes& of) { extremes_[b] = of; }
  BlockScale operator[](std::int64_t b) const { return {scale_[b], lowest_[b], inverse_[b]}; }
  void find() {
    const BlockScales<V> found = Extremes::scales(extremes_);
    V::store(scale_, found.scale);
    V::store(lowest_, found.lowest);
    V::store(inverse_, found.inverse);
  }
  // Writes factor * the first `count` blocks' as a payload has them.
  template <class Code>
  void write(std::int64_t count, float factor, float* target) const {
    for (std::int64_t b = 0; b < count; ++b) {
      target[b * Code::kScales] = factor * scale_[b];
      if constexpr (!Code::kIsSymmetric) target[b * Code::kScales + 1] = factor * lowest_[b];
    }
  }

 private:
  Extremes extremes_[V::width];
  float scale_[V::width];
  float lowest_[V::width];
  float inverse_[V::width];
};

template <class V, class Code, class T>
using BlockRange = std::conditional_t<
    Code::kIsSymmetric, MagnitudeRange<V, Code, T>,
    std::conditional_t<sizeof(T) == 2, OrderedRange<V, Code, T>, FloatRange<V, Code>>>;

}  // namespace
}  // namespace zero_ext::core
