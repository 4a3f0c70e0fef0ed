// Products of small matrices in a core's caches. See optimizer_kernel.h on inclusion.
#pragma once

#include <cstdint>

#include "simd/dot_unit.h"

namespace zero_ext::core {
namespace {

// A matrix of units by two strides.
struct LeftOperand {
  const Unit* data;
  std::int64_t row;    // units from one row to the next
  std::int64_t depth;  // units from one step of the summed dimension to the next
};

// Units [depth, lanes] and floats [rows, lanes], lanes with stride 1.
struct RightOperand {
  const Unit* data;
  std::int64_t depth;
};
struct GemmTarget {
  float* data;
  std::int64_t row;
};

// target [rows, lanes] (=, or += if Add) left [rows, depth] right [depth, lanes]. The order of the
// sum over depth, from zero and then added to the target, is the same for every element wherever
// it lies in its tile.
template <class U, bool Add>
struct MicroGemm {
  using V = typename U::V;

  template <int Rows, int Wide>
  static void tile(const LeftOperand& left, const RightOperand& right, const GemmTarget& target,
                   std::int64_t depth) {
    typename V::Float sums[Rows][Wide];
    for (int m = 0; m < Rows; ++m) {
      for (int n = 0; n < Wide; ++n) sums[m][n] = V::set(0.0F);
    }
    const Unit* a = left.data;
    const Unit* b = right.data;
    for (std::int64_t k = 0; k < depth; ++k, a += left.depth, b += right.depth) {
      typename U::Packed lanes[Wide];
      for (int n = 0; n < Wide; ++n) lanes[n] = U::load(b + n * V::width);
      for (int m = 0; m < Rows; ++m) {
        const typename U::Packed one = U::broadcast(a + m * left.row);
        for (int n = 0; n < Wide; ++n) sums[m][n] = U::dot(sums[m][n], one, lanes[n]);
      }
    }
    for (int m = 0; m < Rows; ++m) {
      for (int n = 0; n < Wide; ++n) {
        float* at = target.data + m * target.row + n * V::width;
        V::store(at, Add ? V::add(V::load(at), sums[m][n]) : sums[m][n]);
      }
    }
  }

  // What is left below a whole tile's rows.
  template <int Rows, int Wide>
  static void last_rows(const LeftOperand& left, const RightOperand& right,
                        const GemmTarget& target, std::int64_t rows, std::int64_t depth) {
    if constexpr (Rows > 0) {
      if (rows == Rows) return tile<Rows, Wide>(left, right, target, depth);
      last_rows<Rows - 1, Wide>(left, right, target, rows, depth);
    }
  }

  template <int Rows, int Wide>
  static void column_of_tiles(LeftOperand left, const RightOperand& right, GemmTarget target,
                              std::int64_t rows, std::int64_t depth) {
    for (; rows >= Rows; rows -= Rows) {
      tile<Rows, Wide>(left, right, target, depth);
      left.data += Rows * left.row;
      target.data += Rows * target.row;
    }
    last_rows<Rows - 1, Wide>(left, right, target, rows, depth);
  }

  // `lanes` is a multiple of the vector's width.
  static void run(const LeftOperand& left, RightOperand right, GemmTarget target, std::int64_t rows,
                  std::int64_t lanes, std::int64_t depth) {
    constexpr std::int64_t wide = V::kWide * V::width;
    for (; lanes >= wide; lanes -= wide) {
      column_of_tiles<V::kWideRows, V::kWide>(left, right, target, rows, depth);
      right.data += wide;
      target.data += wide;
    }
    for (; lanes > 0; lanes -= V::width) {
      column_of_tiles<V::kNarrowRows, 1>(left, right, target, rows, depth);
      right.data += V::width;
      target.data += V::width;
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
