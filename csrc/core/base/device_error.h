// An error that a kernel finds in values that only its device sees. It is kept as numbers, because
// a host cannot read a device's text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "host_device.h"

namespace zero_ext::core {

// Each enumeration is followed by its texts, in the same order.
enum class DeviceOp : std::int64_t {
  adam_step,
  adam_step_8bit,
  lamb_norms,
  lamb_step,
  lion_step,
  quantize_blockwise,
  squared_norm_value,
  attention_forward,
  attention_backward,
};
inline constexpr std::array kDeviceOps = {
    "adam_step_",
    "adam_step_8bit_",
    "lamb_norms_",
    "lamb_step_",
    "lion_step_",
    "quantize_blockwise",
    "squared_norm_value",
    "block_sparse_attention_forward",
    "block_sparse_attention_backward",
};

enum class DeviceArgument : std::int64_t {
  segments,
  hyper,
  values,
  accumulator,
  row_pointers,
  columns,
  column_pointers,
  rows,
};
inline constexpr std::array kDeviceArguments = {
    "segments",     "hyper",   "values",          "accumulator",
    "row_pointers", "columns", "column_pointers", "rows",
};

// A part of an argument's entry. The settings of optimizers are those of a row of hyper-parameters.
enum class DeviceField : std::int64_t {
  none,
  begin,
  end,
  entry,
  lr,
  beta1,
  beta2,
  eps,
  weight_decay,
  step,
  decoupled,
  maximize,
  correction1,
  correction2,
  eps_inside_sqrt,
  trust_ratio,
};
inline constexpr std::array kDeviceFields = {
    "none",        "begin",    "end",         "entry",        "lr",
    "beta1",       "beta2",    "eps",         "weight_decay", "step",
    "decoupled",   "maximize", "correction1", "correction2",  "eps_inside_sqrt",
    "trust_ratio",
};

enum class ExpectedValue : std::int64_t {
  finite,
  finite_not_negative,
  finite_at_least_one,
  below_one,
  up_to_one,
  zero_or_one,
  from_the_end_before,
  from_begin_to_numel,
  not_negative_unsigned,
  not_negative_sum,
  ascending_offset,
  ascending_block,
  any,
};
inline constexpr std::array kExpectedValues = {
    "finite",
    "finite and not negative",
    "finite and at least 1",
    "in [0, 1)",
    "in (0, 1]",
    "0 or 1",
    "at least the end of the segment before, or 0",
    "from the segment's begin to the number of elements",
    "0 or more for the unsigned code",
    "0 or more in a sum of squares",
    "an offset into the blocks, not below the one before",
    "a block of the layout, above the one before in its list",
    "any number",
};

template <class Code, std::size_t kCount>
constexpr const char* text_of(Code code, const std::array<const char*, kCount>& texts) {
  const auto index = static_cast<std::size_t>(code);
  return index < kCount ? texts[index] : "unknown";
}

// The number of an op that has kernels which record errors.
constexpr DeviceOp device_op(std::string_view name) {
  std::size_t index = 0;
  while (index < kDeviceOps.size() && name != kDeviceOps[index]) ++index;
  return static_cast<DeviceOp>(index);
}

struct DeviceError {
  DeviceOp op;
  DeviceArgument argument;
  std::int64_t index;
  DeviceField field;
  double value;
  ExpectedValue expected;
};

// One for each device, in its memory. It holds the first error since it was last taken.
struct DeviceErrorRecord {
  enum State : std::int64_t { empty, busy, complete };

  std::int64_t state;
  DeviceError error;
};
inline constexpr int kDeviceErrorWords = 7;  // of 64 bits
static_assert(sizeof(DeviceErrorRecord) == kDeviceErrorWords * sizeof(std::int64_t));

// "adam_step_: beta1 of hyper[3]: expected in [0, 1), got 1.5."; empty if there is no error.
std::string device_error_text(const DeviceErrorRecord& record);

}  // namespace zero_ext::core
