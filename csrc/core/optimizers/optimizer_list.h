// The list of optimizers with a fused step: kernels and ops of each follow from it.
#pragma once

namespace zero_ext::core {

struct AdamRule;
struct LambRule;
struct LionRule;

// Float32 coefficients of one segment, prepared once from its double hyper-parameters.
template <class Rule>
struct CoefficientsOf;

template <class... Rules>
struct RuleList {
  // Calls visit.operator()<Rule>() for each of them.
  template <class Visit>
  static constexpr void visit(const Visit& visit) {
    (visit.template operator()<Rules>(), ...);
  }
};

using OptimizerRules = RuleList<AdamRule, LambRule, LionRule>;

}  // namespace zero_ext::core
