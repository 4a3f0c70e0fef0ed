// Copies of rows in the forms that products read. See optimizer_kernel.h on inclusion.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "query_tile.h"
#include "simd/dot_unit.h"

namespace zero_ext::core {
namespace {

// T is the type of the inputs, U the units of the products.
template <class U, class T>
struct Pack {
  using V = typename U::V;
  using Element = typename U::Element;

  // One row of `count` elements as Elements, with zeros up to `padded`.
  static void row(const T* source, std::int64_t count, std::int64_t padded, Element* target) {
    if constexpr (std::is_same_v<T, Element>) {
      std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(T));
    } else {
      std::int64_t i = 0;
      for (; i + V::width <= count; i += V::width) V::store(target + i, V::load(source + i));
      for (; i < count; ++i) target[i] = from_float<Element>(to_float(source[i]));
    }
    if (padded > count) {
      std::memset(target + count, 0, static_cast<std::size_t>(padded - count) * sizeof(Element));
    }
  }

  // Floats as one row of Out.
  template <class Out>
  static void store(const float* source, std::int64_t count, Out* target) {
    std::int64_t i = 0;
    for (; i + V::width <= count; i += V::width) V::store(target + i, V::load(source + i));
    for (; i < count; ++i) target[i] = from_float<Out>(source[i]);
  }

  // Rows [first, first + count) of one head, then rows of zeros up to `padded_rows`.
  static void rows(const T* head, std::int64_t stride, std::int64_t first, std::int64_t count,
                   std::int64_t padded_rows, std::int64_t dim, std::int64_t padded_dim,
                   Element* target) {
    for (std::int64_t i = 0; i < count; ++i) {
      row(head + (first + i) * stride, dim, padded_dim, target + i * padded_dim);
    }
    if (padded_rows > count) {
      std::memset(target + count * padded_dim, 0,
                  static_cast<std::size_t>((padded_rows - count) * padded_dim) * sizeof(Element));
    }
  }

  // Units [rows, units] to [units, kTile]: row r becomes lane r.
  static void transpose(const Unit* source, std::int64_t row_units, std::int64_t rows,
                        std::int64_t units, Unit* target) {
    for (std::int64_t first = 0; first < units; first += 16) {
      const std::int64_t end = units - first < 16 ? units : first + 16;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t u = first; u < end; ++u) {
          target[u * kTile + r] = source[r * row_units + u];
        }
      }
    }
  }

  // Elements [rows, dim], rows a multiple of kPair, to units [rows / kPair, dim] of consecutive
  // rows. Units of one element are the rows themselves, which are returned.
  static const Unit* down(const Element* source, std::int64_t rows, std::int64_t dim,
                          Unit* target) {
    if constexpr (U::kPair == 1) {
      return reinterpret_cast<const Unit*>(source);
    } else {
      for (std::int64_t r = 0; r < rows; r += 2) {
        U::interleave(source + r * dim, source + (r + 1) * dim, dim, target + r / 2 * dim);
      }
      return target;
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
