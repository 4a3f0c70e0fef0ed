// zero_ext::softmax_sums and softmax_gradient_: the cross entropy of rows of logits on a CPU.
#include "../../core/loss/cross_entropy.h"

#include <cmath>

#include "../checks.h"
#include "../op_registration.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrain = 32768;  // logits of a thread

core::LogitRows read_rows(const char* op, const Tensor& logits, const Tensor& labels,
                          double softcap) {
  const Argument argument{op, "logits"};
  const core::NumericType type = check_numeric(logits, argument);
  STD_TORCH_CHECK(logits.dim() == 2, label(argument), "expected shape [tokens, words], got ",
                  shape_text(logits), ". Pass a row of logits for each token.");
  const Argument of_labels{op, "labels"};
  check_dtype(labels, of_labels, ScalarType::Long);
  check_flat(labels, of_labels, logits.size(0));
  STD_TORCH_CHECK(std::isfinite(softcap) && softcap >= 0, op,
                  ": argument 'softcap': expected a finite number of at least 0, got ", softcap,
                  ". Pass 0 for none.");
  return {const_cast<void*>(logits.const_data_ptr()), type, logits.size(1),
          labels.const_data_ptr<std::int64_t>(), static_cast<float>(softcap)};
}

// Rows of float32 [rows, tokens], one for each coefficient of the tokens.
const float* read_coefficients(const char* op, const char* name, const Tensor& values,
                               const Tensor& logits, std::int64_t rows) {
  const Argument argument{op, name};
  check_dtype(values, argument, ScalarType::Float);
  STD_TORCH_CHECK(values.dim() == 2 && values.size(0) == rows && values.size(1) == logits.size(0),
                  label(argument), "expected shape [", rows, ", ", logits.size(0), "], got ",
                  shape_text(values), ". Pass a column for each token.");
  return values.const_data_ptr<float>();
}

std::int64_t rows_of_a_thread(const core::LogitRows& rows) {
  return 1 + kGrain / (rows.words > 0 ? rows.words : 1);
}

Tensor softmax_sums(const Tensor& logits, const Tensor& labels, const Tensor& largest,
                    double softcap) {
  constexpr const char* op = "softmax_sums";
  const core::LogitRows rows = read_rows(op, logits, labels, softcap);
  const float* const references = read_coefficients(op, "largest", largest, logits, 1);
  const std::int64_t tokens = logits.size(0);
  const Tensor result = torch::stable::new_empty(largest, {3, tokens});
  auto* const found = result.mutable_data_ptr<float>();
  const core::SoftmaxSums sums{references, found, found + tokens, found + 2 * tokens};
  torch::stable::parallel_for(
      0, tokens, rows_of_a_thread(rows),
      [&](std::int64_t begin, std::int64_t end) { core::sum_softmax(rows, sums, begin, end); });
  return result;
}

void softmax_gradient(const Tensor& logits, const Tensor& labels, const Tensor& coefficients,
                      double softcap) {
  constexpr const char* op = "softmax_gradient_";
  const core::LogitRows rows = read_rows(op, logits, labels, softcap);
  const float* const each = read_coefficients(op, "coefficients", coefficients, logits, 4);
  check_disjoint({memory_range(logits, {op, "logits"}), memory_range(labels, {op, "labels"}),
                  memory_range(coefficients, {op, "coefficients"})});
  const std::int64_t tokens = logits.size(0);
  const core::SoftmaxGradient gradient{each, each + tokens, each + 2 * tokens, each + 3 * tokens};
  torch::stable::parallel_for(0, tokens, rows_of_a_thread(rows),
                              [&](std::int64_t begin, std::int64_t end) {
                                core::differentiate_softmax(rows, gradient, begin, end);
                              });
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("softmax_sums(Tensor logits, Tensor labels, Tensor largest, float softcap) -> Tensor",
      TORCH_BOX(&softmax_sums));
  ops("softmax_gradient_(Tensor(a!) logits, Tensor labels, Tensor coefficients, float softcap)"
      " -> ()",
      TORCH_BOX(&softmax_gradient));
}

}  // namespace zero_ext::ops
