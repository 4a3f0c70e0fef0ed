// What the products of matrices are made of: 32-bit units along the summed dimension, each one
// float, or two bfloat16 numbers where the machine multiplies those in pairs (dot_unit_bf16.h).
// See optimizer_kernel.h on inclusion.
//
// A units type has its Vector type V; the Element it stores; kPair, elements of a unit; a Packed
// vector of units; load and broadcast of units; dot(sum, a, b), which adds the products of units
// lane by lane; and pack, which makes units of vectors of kPair consecutive elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "../attention_args.h"

namespace zero_ext::core {
namespace {

// Four bytes that hold a unit.
using Unit = std::uint32_t;

template <class Vector>
struct FloatDotUnit {
  using V = Vector;
  using Element = float;
  static constexpr int kPair = 1;
  using Packed = typename V::Float;

  static Packed load(const Unit* source) { return V::load(reinterpret_cast<const float*>(source)); }
  static Packed broadcast(const Unit* source) {
    return V::set(*reinterpret_cast<const float*>(source));
  }
  static typename V::Float dot(typename V::Float sum, Packed a, Packed b) {
    return V::fma(a, b, sum);
  }
};

}  // namespace
}  // namespace zero_ext::core
