#include "fault_injection.h"

#include <algorithm>

#include "../base/error_text.h"

namespace zero_ext::core {

void FaultPlan::add(const FaultRule& rule) {
  require(rule.after >= 0 && rule.times >= 1 && rule.result >= -4095,
          "fault rule: expected after >= 0, times >= 1 and result >= -4095, got ", rule.after, ", ",
          rule.times, " and ", rule.result, ". Correct the rule.");
  const std::lock_guard lock(mutex_);
  rules_.push_back(rule);
  armed_.store(true, std::memory_order_release);
}

std::int64_t FaultPlan::apply(IoDirection direction, std::int64_t result) {
  if (!armed_.load(std::memory_order_acquire)) return result;
  const std::lock_guard lock(mutex_);
  std::int64_t adjusted = result;
  for (FaultRule& rule : rules_) {
    if (rule.direction != direction) continue;
    if (rule.after > 0) {
      --rule.after;
      continue;
    }
    --rule.times;
    adjusted = rule.result < 0 ? rule.result : std::min(adjusted, rule.result);
  }
  std::erase_if(rules_, [](const FaultRule& rule) { return rule.times == 0; });
  armed_.store(!rules_.empty(), std::memory_order_release);
  return adjusted;
}

}  // namespace zero_ext::core
