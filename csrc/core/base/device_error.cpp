#include "device_error.h"

#include <cstdio>

namespace zero_ext::core {

std::string device_error_text(const DeviceErrorRecord& record) {
  if (record.state != DeviceErrorRecord::complete) return "";
  const DeviceError& error = record.error;
  char value[32];
  std::snprintf(value, sizeof(value), "%.15g", error.value);
  return std::string(text_of(error.op, kDeviceOps)) + ": " + text_of(error.field, kDeviceFields) +
         " of " + text_of(error.argument, kDeviceArguments) + "[" + std::to_string(error.index) +
         "]: expected " + text_of(error.expected, kExpectedValues) + ", got " + value + ".";
}

}  // namespace zero_ext::core
