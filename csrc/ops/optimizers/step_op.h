// The op of a rule's step, for the host and for devices.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "optimizer_arg_checks.h"

namespace zero_ext::ops {

// What a step gets besides its buffers.
struct StepSettings {
  const Tensor& segments;
  const Tensor& hyper;
  const Tensor& grad_scale;
};

// `Step` has run<Rule>(master, buffers, settings).
template <class Rule, class Step, class = std::make_index_sequence<Rule::kMoments>>
struct StepOp;

template <class Rule, class Step, std::size_t... kMoment>
struct StepOp<Rule, Step, std::index_sequence<kMoment...>> {
  template <std::size_t>
  using Moment = const Tensor&;

  static void call(const Tensor& master, Moment<kMoment>... moments, const Tensor& grad,
                   const OptionalTensor& param, const Tensor& segments, const Tensor& hyper,
                   const Tensor& grad_scale, const OptionalTensor& non_finite) {
    const std::array named{MomentTensor{Rule::kMomentNames[kMoment], moments}...};
    Step::template run<Rule>(master,
                             read_step_buffers(Rule::kOp, master, named, grad, param, non_finite),
                             {segments, hyper, grad_scale});
  }

  // "adam_step_(Tensor(a!) master, Tensor(b!) exp_avg, ...".
  static std::string schema() {
    char alias = 'a';
    const auto changed = [&alias] { return std::string("Tensor(") + alias++ + "!)"; };
    std::string result = std::string(Rule::kOp) + "(" + changed() + " master";
    for (const char* name : Rule::kMomentNames) result += ", " + changed() + " " + name;
    result += ", Tensor grad, " + changed() + "? param, Tensor segments, Tensor hyper";
    return result + ", Tensor grad_scale, " + changed() + "? non_finite=None) -> ()";
  }
};

}  // namespace zero_ext::ops
