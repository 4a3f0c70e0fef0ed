#include "checks.h"

#include <algorithm>

namespace zero_ext::ops {

std::string label(const Argument& argument) {
  return std::string(argument.op) + ": argument '" + argument.name + "' ";
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
  STD_TORCH_CHECK(tensor.is_contiguous(), label(argument), "of shape ", shape_text(tensor),
                  " is not contiguous; pass tensor.contiguous() or a contiguous view");
}

void check_dtype(const Tensor& tensor, const Argument& argument, ScalarType expected) {
  check_layout(tensor, argument);
  STD_TORCH_CHECK(tensor.scalar_type() == expected, label(argument), "has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), "; it must be ",
                  torch::headeronly::toString(expected));
}

core::NumericType check_numeric(const Tensor& tensor, const Argument& argument) {
  check_layout(tensor, argument);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return core::NumericType::float32;
    case ScalarType::BFloat16:
      return core::NumericType::bfloat16;
    case ScalarType::Half:
      return core::NumericType::float16;
    default:
      STD_TORCH_CHECK(false, label(argument), "has dtype ",
                      torch::headeronly::toString(tensor.scalar_type()),
                      "; it must be Float, BFloat16 or Half");
  }
}

void check_flat(const Tensor& tensor, const Argument& argument, std::int64_t numel) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.numel() == numel, label(argument), "has shape ",
                  shape_text(tensor), "; it must be one-dimensional with ", numel, " elements");
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
                    "overlaps the memory of argument '", ranges[i - 1].argument.name,
                    "'; give each its own memory");
  }
}

}  // namespace zero_ext::ops
