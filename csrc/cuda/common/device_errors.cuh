// Where kernels of a device record errors.
#pragma once

#include "error_recording.h"

namespace zero_ext::cuda {

// The record of the current device. It is in the device's memory as long as the process lives, so a
// captured graph may refer to it.
DeviceErrorRecord* device_errors(const char* op);

}  // namespace zero_ext::cuda
