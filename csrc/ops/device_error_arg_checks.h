// The tensor that an error of a device is moved to.
#pragma once

#include "../core/base/device_error.h"
#include "checks.h"

namespace zero_ext::ops {

// int64 [core::kDeviceErrorWords]; returns its memory.
inline std::int64_t* check_device_error(const char* op, const Tensor& record) {
  check_dtype(record, {op, "record"}, ScalarType::Long);
  check_flat(record, {op, "record"}, core::kDeviceErrorWords);
  return record.mutable_data_ptr<std::int64_t>();
}

}  // namespace zero_ext::ops
