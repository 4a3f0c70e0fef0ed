// Decoding and encoding one vector of 8-bit dynamic codes.
#pragma once

#include <cstdint>

#include "../base/host_device.h"
#include "dynamic_code.h"

namespace zero_ext::core {

// The values of a vector of codes 0..255, which are given as floats.
//
// 2 d + 1, where d is the distance to zero's code (of the unsigned code: one more), has the decade
// as its exponent and the middle of the cell as its fraction.
template <class V, class Code>
ZERO_EXT_HOST_DEVICE typename V::Float decode_dynamic(typename V::Float code) {
  using Float = typename V::Float;
  static constexpr DynamicCodeTables tables = Code::tables;  // in the memory of either side
  const Float from_zero = Code::is_signed ? V::sub(code, V::set(float{Code::zero})) : code;
  const Float distance = Code::is_signed ? V::abs(from_zero) : code;
  const Float odd = V::fma(V::set(2.0F), distance, V::set(Code::is_signed ? 1.0F : 3.0F));
  const Float magnitude = V::fma(V::fraction(odd), V::by_exponent(tables.decade_span, odd),
                                 V::by_exponent(tables.decade_begin, odd));
  return Code::is_signed ? V::copy_sign(magnitude, from_zero) : magnitude;
}

// The codes, as floats, of the values nearest to a vector of finite ones in [-1, 1].
//
// Halfway between two values the larger magnitude's code is taken. "Halfway" is subject to the
// rounding of one fused multiply-add, 2^-14 of a cell; it is the same on every instruction set.
template <class V, class Code>
ZERO_EXT_HOST_DEVICE typename V::Float encode_dynamic(typename V::Float value) {
  using Float = typename V::Float;
  static constexpr DynamicCodeTables tables = Code::tables;  // in the memory of either side
  const Float magnitude = V::abs(value);
  auto decade = V::template set_bits<float>(0);
  decade = V::add_if_at_least(decade, 4, magnitude, V::set(tables.highest_boundary));
  decade = V::add_if_at_least(decade, 2, magnitude, V::lookup(tables.middle_boundary, decade));
  decade = V::add_if_at_least(decade, 1, magnitude, V::lookup(tables.lowest_boundary, decade));
  const Float cell = V::floor(V::fma(magnitude, V::lookup(tables.cells_per_unit, decade),
                                     V::lookup(tables.cell_offset, decade)));
  const Float code = V::min(cell, V::lookup(tables.last_code, decade));
  const Float one = V::set(static_cast<float>(255 - Code::zero));
  // The signed code has no -1, so the value decides, not its magnitude.
  const Float either = V::if_at_least(value, V::set(tables.one_boundary), one, code);
  if constexpr (!Code::is_signed) return either;
  return V::add(V::copy_sign(either, value), V::set(float{Code::zero}));
}

}  // namespace zero_ext::core
