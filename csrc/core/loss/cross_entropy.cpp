#include "cross_entropy.h"

#include "../attention/attention_kernels.h"
#include "../simd/fp_mode_guard.h"

namespace zero_ext::core {

void sum_softmax(const LogitRows& rows, const SoftmaxSums& sums, std::int64_t begin,
                 std::int64_t end) {
  [[maybe_unused]] const FpModeGuard fp_mode;
  active_attention().of_type[static_cast<int>(rows.type)].sum_softmax(rows, sums, begin, end);
}

void differentiate_softmax(const LogitRows& rows, const SoftmaxGradient& gradient,
                           std::int64_t begin, std::int64_t end) {
  [[maybe_unused]] const FpModeGuard fp_mode;
  active_attention().of_type[static_cast<int>(rows.type)].differentiate_softmax(rows, gradient,
                                                                                begin, end);
}

}  // namespace zero_ext::core
