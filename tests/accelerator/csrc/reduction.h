// Sums as a ring of ranks makes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace stand_in {

// What NCCL has of torch's reductions, for tensors of a dtype that it has.
struct Reduction {
  c10d::ReduceOp::RedOpType kind;
  double factor = 1.0;  // of every value before it is summed up

  std::string text() const;
};

// Throws for what NCCL refuses.
Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType dtype, int size);

// Reduces `inputs`, host tensors [numel] of the ranks. Slice k of as many as there are ranks begins
// with rank k + 1 and goes round, and every partial result is rounded to the dtype.
at::Tensor reduce_in_ring(const Reduction& reduction, const std::vector<at::Tensor>& inputs);

// The same with all of it begun by the rank after `slice`.
at::Tensor reduce_slice(const Reduction& reduction, const std::vector<at::Tensor>& inputs,
                        int slice);

}  // namespace stand_in
