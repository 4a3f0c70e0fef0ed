#include "checks.h"

#include <algorithm>

namespace zero_ext::ops {

std::string label(const Argument& argument) {
  return std::string(argument.op) + ": argument '" + argument.name + "': ";
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

void check_layout(const Tensor& tensor, const Argument& argument) {
  check_device(tensor, argument);
  STD_TORCH_CHECK(tensor.is_contiguous(), label(argument),
                  "expected a contiguous tensor, got shape ", shape_text(tensor),
                  " with other strides. Pass tensor.contiguous() or a contiguous view.");
}

void check_dtype(const Tensor& tensor, const Argument& argument, ScalarType expected) {
  check_layout(tensor, argument);
  STD_TORCH_CHECK(tensor.scalar_type() == expected, label(argument), "expected dtype ",
                  torch::headeronly::toString(expected), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()), ". Convert it.");
}

core::NumericType numeric_type(const Tensor& tensor, const Argument& argument) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return core::NumericType::float32;
    case ScalarType::BFloat16:
      return core::NumericType::bfloat16;
    case ScalarType::Half:
      return core::NumericType::float16;
    default:
      STD_TORCH_CHECK(false, label(argument), "expected dtype Float, BFloat16 or Half, got ",
                      torch::headeronly::toString(tensor.scalar_type()), ". Convert it.");
  }
}

core::NumericType check_numeric(const Tensor& tensor, const Argument& argument) {
  check_layout(tensor, argument);
  return numeric_type(tensor, argument);
}

void check_flat(const Tensor& tensor, const Argument& argument, std::int64_t numel) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.numel() == numel, label(argument),
                  "expected one dimension with ", numel, " elements, got shape ",
                  shape_text(tensor), ". Reshape it or pass another.");
}

MemoryRange memory_range(const Tensor& tensor, const Argument& argument) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto bytes = static_cast<std::uintptr_t>(tensor.numel()) * tensor.element_size();
  return {begin, begin + bytes, argument};
}

void check_disjoint(std::vector<MemoryRange> ranges) {
  std::erase_if(ranges, [](const MemoryRange& each) { return each.begin == each.end; });
  std::sort(ranges.begin(), ranges.end(),
            [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    STD_TORCH_CHECK(ranges[i].begin >= ranges[i - 1].end, label(ranges[i].argument),
                    "expected its own memory, got some of argument '", ranges[i - 1].argument.name,
                    "'. Pass tensors that do not overlap.");
  }
}

}  // namespace zero_ext::ops
