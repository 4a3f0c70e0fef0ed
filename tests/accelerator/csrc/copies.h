// Copies between host and device and on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace stand_in {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination);
at::Scalar read_scalar(const at::Tensor& tensor);
// Copies asked for as non-blocking whose host side was not pinned, so far.
std::int64_t pageable_copies();

}  // namespace stand_in
