#include "reduction.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace stand_in {

using c10d::ReduceOp;

std::string Reduction::text() const {
  switch (kind) {
    case ReduceOp::SUM:
      return "sum";
    case ReduceOp::AVG:
      return "avg";
    case ReduceOp::PRODUCT:
      return "product";
    case ReduceOp::MIN:
      return "min";
    case ReduceOp::MAX:
      return "max";
    default:
      return "sum of " + std::to_string(factor) + " times";
  }
}

Reduction reduction_of(const ReduceOp& op, at::ScalarType dtype, int size) {
  const auto kind = op.op_;
  TORCH_CHECK(kind != ReduceOp::BAND && kind != ReduceOp::BOR && kind != ReduceOp::BXOR,
              "stand_in_ccl: cannot reduce by bits");
  const bool floating = at::isFloatingType(dtype);
  TORCH_CHECK(dtype != at::kBool || kind != ReduceOp::AVG, "stand_in_ccl: cannot average bool");
  if (kind == ReduceOp::PREMUL_SUM) {
    TORCH_CHECK(floating, "stand_in_ccl: a factor wants a floating dtype, got ", dtype);
    const auto* const given =
        static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    return {kind, given->tensor_factor.defined() ? given->tensor_factor.item<double>()
                                                 : given->double_factor};
  }
  return {kind, kind == ReduceOp::AVG && floating ? 1.0 / size : 1.0};
}

at::Tensor reduce_slice(const Reduction& reduction, const std::vector<at::Tensor>& inputs,
                        int slice) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto size = static_cast<int>(inputs.size());
  at::Tensor result;
  for (int step = 1; step <= size; ++step) {
    at::Tensor input = inputs.at(static_cast<std::size_t>((slice + step) % size));
    if (reduction.factor != 1.0) {
      input = input.mul(reduction.factor);
    }
    switch (step == 1 ? ReduceOp::UNUSED : reduction.kind) {
      case ReduceOp::UNUSED:
        result = input.clone();
        break;
      case ReduceOp::PRODUCT:
        result.mul_(input);
        break;
      case ReduceOp::MIN:
        result = result.minimum(input);
        break;
      case ReduceOp::MAX:
        result = result.maximum(input);
        break;
      default:
        result.add_(input);
    }
  }
  if (reduction.kind == ReduceOp::AVG && !result.is_floating_point()) {
    result.div_(size, "trunc");
  }
  return result;
}

at::Tensor reduce_in_ring(const Reduction& reduction, const std::vector<at::Tensor>& inputs) {
  const auto size = static_cast<std::int64_t>(inputs.size());
  const std::int64_t numel = inputs.front().numel();
  at::Tensor result = at::empty_like(inputs.front());
  for (std::int64_t slice = 0; slice < size; ++slice) {
    const std::int64_t begin = numel * slice / size, end = numel * (slice + 1) / size;
    std::vector<at::Tensor> slices;
    for (const at::Tensor& input : inputs) {
      slices.push_back(input.slice(0, begin, end));
    }
    result.slice(0, begin, end).copy_(reduce_slice(reduction, slices, static_cast<int>(slice)));
  }
  return result;
}

}  // namespace stand_in
