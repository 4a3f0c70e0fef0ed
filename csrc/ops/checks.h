// Checks that every op makes on its arguments before it changes anything.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../core/base/numeric_types.h"
#include "torch_stable.h"

namespace zero_ext::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Names one tensor argument in messages: "pack_: tensors[3]".
struct Argument {
  const char* op;
  std::string name;
};

// The bytes a tensor's elements occupy.
struct MemoryRange {
  std::uintptr_t begin;
  std::uintptr_t end;
  Argument argument;
};

std::string shape_text(const Tensor& tensor);

// "pack_: argument 'tensors[3]' "
std::string label(const Argument& argument);

// On the device whose kernels the module holds; each module brings its own.
void check_device(const Tensor& tensor, const Argument& argument);

// On the module's device and contiguous.
void check_layout(const Tensor& tensor, const Argument& argument);

// On the module's device, contiguous and of exactly this dtype.
void check_dtype(const Tensor& tensor, const Argument& argument, ScalarType expected);

// Its dtype if that is float32, bfloat16 or float16.
core::NumericType numeric_type(const Tensor& tensor, const Argument& argument);

// On the module's device and contiguous, with dtype float32, bfloat16 or float16, which is
// returned.
core::NumericType check_numeric(const Tensor& tensor, const Argument& argument);

// One-dimensional with `numel` elements.
void check_flat(const Tensor& tensor, const Argument& argument, std::int64_t numel);

MemoryRange memory_range(const Tensor& tensor, const Argument& argument);

// No two non-empty extents share a byte.
void check_disjoint(std::vector<MemoryRange> ranges);

}  // namespace zero_ext::ops
