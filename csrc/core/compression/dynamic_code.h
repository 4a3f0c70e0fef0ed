// The two 8-bit dynamic codes: 256 values of magnitude at most one, dense in relative terms.
//
// Behind the sign, where there is one, k zero bits choose the decade (10^-(k+1), 10^-k], a one ends
// them, and the fraction that is left cuts the decade into equal cells; the code stands for its
// cell's middle. The signed code leaves 6 - k fraction bits for k = 0..6; the unsigned one gives
// the sign's bit to the fraction, so that it has 7 - k. Either way two codes are left over, which
// stand for 0 and 1. A code's number is its rank by value.
//
// So decade i = 7 - k, counted from the smallest, has 2^(i - 1) cells above zero (signed) or 2^i
// (unsigned), and where a cell lies in its decade can be read off a binary logarithm: no table of
// 256 entries is searched, in either direction.
//
// Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise
// quantization", sections 1.3 and 2.2 (arXiv 2110.02861).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace zero_ext::core {

// Tables of eight, indexed by class of magnitude.
struct DynamicCodeTables {
  // To decode. The index is an odd number's binary exponent modulo 8, see decode_dynamic.
  float decade_span[8];
  float decade_begin[8];
  // To encode. The class is 0 below the first decade, else the decade 1..7. Its bits are found from
  // the highest by comparison with a boundary, whose index is made of the bits known so far.
  float highest_boundary;
  float middle_boundary[8];
  float lowest_boundary[8];
  float cells_per_unit[8];  // code = floor(cells_per_unit * magnitude + cell_offset), at most
  float cell_offset[8];     // last_code; for the signed code counted from zero's
  float last_code[8];
  float one_boundary;  // from here on the magnitude is nearest to 1
};

struct DynamicCodeBuilder {
  static constexpr int kDecades = 7;
  static constexpr double kBegin = 0.1;  // a decade's ends, as parts of its upper one
  static constexpr double kSpan = 0.9;

  bool is_signed;

  static consteval double power_of_ten(int exponent) {
    double power = 1;
    for (int i = 0; i < exponent; ++i) power *= 10;
    return power;
  }
  consteval double cells(int decade) const {
    double count = is_signed ? 0.5 : 1;
    for (int i = 0; i < decade; ++i) count *= 2;
    return count;
  }
  // Code of the decade's first cell, counted from zero's.
  consteval double first(int decade) const { return is_signed ? cells(decade) : cells(decade) - 1; }

  // Middle of one of the decade's cells.
  consteval double value(int decade, double cell) const {
    return (kBegin + kSpan * (cell + 0.5) / cells(decade)) / power_of_ten(kDecades - decade);
  }
  // Halfway between the values on both sides of the decade's lower end.
  consteval double boundary(int decade) const {
    const double below = decade == 1 ? 0 : value(decade - 1, cells(decade - 1) - 1);
    return (below + value(decade, 0)) / 2;
  }

  consteval DynamicCodeTables tables() const {
    DynamicCodeTables result{};
    for (int decade = 1; decade <= kDecades; ++decade) {
      // Biased exponents are 127 more, and the unsigned code's odd numbers are twice as large.
      const int index = (127 + decade + (is_signed ? 0 : 1)) % 8;
      const double unit = 1 / power_of_ten(kDecades - decade);
      result.decade_span[index] = static_cast<float>(kSpan * unit);
      result.decade_begin[index] = static_cast<float>(kBegin * unit);
      result.cells_per_unit[decade] = static_cast<float>(cells(decade) / (kSpan * unit));
      result.cell_offset[decade] =
          static_cast<float>(first(decade) - cells(decade) * kBegin / kSpan);
      result.last_code[decade] = static_cast<float>(first(decade) + cells(decade) - 1);
    }
    for (const int known : {0, 4}) result.middle_boundary[known] = rounded_boundary(known + 2);
    for (const int known : {0, 2, 4, 6})
      result.lowest_boundary[known] = rounded_boundary(known + 1);
    result.highest_boundary = rounded_boundary(4);
    result.one_boundary = static_cast<float>((value(kDecades, cells(kDecades) - 1) + 1) / 2);
    ends(result);
    return result;
  }

 private:
  consteval float rounded_boundary(int decade) const {
    return static_cast<float>(boundary(decade));
  }

  // Zero and one share the index that the decades leave. Their odd numbers are 1 and 257, with
  // fractions 0 and 1/256 (signed), or 3 and 513, with fractions 1/2 and 1/512 (unsigned): a line
  // through both. It is exact in float32.
  consteval void ends(DynamicCodeTables& result) const {
    if (is_signed) {
      result.decade_span[7] = 256;
      result.decade_begin[7] = 0;
      return;
    }
    result.decade_span[0] = static_cast<float>(-512.0 / 255.0);
    result.decade_begin[0] = static_cast<float>(256.0 / 255.0);
    // Below the first decade every positive magnitude takes the smallest positive value.
    result.cells_per_unit[0] = std::numeric_limits<float>::max();
    result.last_code[0] = 1;
  }
};

// For values of either sign: exp_avg.
struct SignedDynamicCode {
  static constexpr bool is_signed = true;
  static constexpr std::uint8_t zero = 127;
  static constexpr DynamicCodeTables tables = DynamicCodeBuilder{true}.tables();
};

// For values that are never negative: exp_avg_sq. A positive value never becomes zero, even where
// zero is nearer: the next step would divide by what little its own gradient adds.
struct UnsignedDynamicCode {
  static constexpr bool is_signed = false;
  static constexpr std::uint8_t zero = 0;
  static constexpr DynamicCodeTables tables = DynamicCodeBuilder{false}.tables();
};

}  // namespace zero_ext::core
