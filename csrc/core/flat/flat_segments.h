// Tensors and their offsets in one flat buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../base/numeric_types.h"

namespace zero_ext::core {

struct FlatSegment {
  void* tensor;
  NumericType type;
  std::int64_t offset;  // in the flat buffer, in elements
  std::int64_t start;   // elements of all earlier segments
  std::int64_t numel;
};

struct FlatSegments {
  std::vector<FlatSegment> list;
  std::int64_t total = 0;
  std::byte* flat = nullptr;
  NumericType flat_type = NumericType::float32;
};

}  // namespace zero_ext::core
