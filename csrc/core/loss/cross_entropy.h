// The softmax of rows of logits, for a cross entropy that never holds more than a few rows.
#pragma once

#include <cstdint>

#include "../base/numeric_types.h"

namespace zero_ext::core {

// Logits [rows, words]. Each is replaced by softcap * tanh(logit / softcap), unless softcap is 0.
// A label outside of the words stands for a word of another slice of the vocabulary.
struct LogitRows {
  void* logits;
  NumericType type;
  std::int64_t words;
  const std::int64_t* labels;
  float softcap;
};

// For each row: the sum of exp(logit - largest), the label's logit - largest, or 0 without one, and
// the sum of all logits - largest.
struct SoftmaxSums {
  const float* largest;
  float* sum;
  float* label;
  float* rest;
};

// The gradient of each logit by the formula exp(logit - largest) * scale - uniform, less
// `target` for the label.
struct SoftmaxGradient {
  const float* largest;
  const float* scale;
  const float* uniform;
  const float* target;
};

// Of the rows [begin, end).
void sum_softmax(const LogitRows& rows, const SoftmaxSums& sums, std::int64_t begin,
                 std::int64_t end);

// Replaces the logits of the rows [begin, end) by their gradients.
void differentiate_softmax(const LogitRows& rows, const SoftmaxGradient& gradient,
                           std::int64_t begin, std::int64_t end);

}  // namespace zero_ext::core
