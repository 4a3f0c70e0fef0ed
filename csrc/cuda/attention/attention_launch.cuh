// What the launches of block-sparse attention share: from the tensors of an op to the arguments of
// kernels, and a block of threads for each of their pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "../../ops/attention_arguments.h"
#include "../machine/device_machine.cuh"
#include "../machine/dispatch.h"
#include "../machine/launch.cuh"
#include "attention_scores.h"
#include "attention_shape.h"

namespace zero_ext::cuda {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Shape::kMostThreads, Kernel::Shape::kLeastBlocks)
    run_attention(const __grid_constant__ Kernel kernel) {
  extern __shared__ __align__(16) std::byte memory[];
  kernel(DeviceMachine(memory));
}

template <class Kernel>
void launch_attention(const char* op, const Kernel& kernel) {
  const std::int64_t blocks = kernel.blocks();
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= INT32_MAX, op, ": the layout has ", blocks,
                  " pieces over all batches and heads, and a launch takes at most ", INT32_MAX,
                  "; split the batch");
  constexpr int most = Kernel::template shared_bytes<DeviceMachine>(Kernel::Shape::kMostRows);
  static_assert(most <= kMostSharedBytes);
  const Launcher launcher(op);
  check(op, cudaFuncSetAttribute(run_attention<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most));
  const int rows = kernel.rows();
  run_attention<Kernel>
      <<<static_cast<unsigned>(blocks), static_cast<unsigned>(rows / kWarpRows * kWarpLanes),
         static_cast<std::size_t>(Kernel::template shared_bytes<DeviceMachine>(rows)),
         launcher.stream>>>(kernel);
  check(op, cudaGetLastError());
}

// Calls visit(std::integral_constant<int, kDim>) with the least head dim of a kernel that holds
// `dim`.
template <class Visit>
void with_head_dim(std::int64_t dim, const Visit& visit) {
  if (dim <= 32) return visit(std::integral_constant<int, 32>{});
  if (dim <= 64) return visit(std::integral_constant<int, 64>{});
  if (dim <= 128) return visit(std::integral_constant<int, 128>{});
  visit(std::integral_constant<int, 256>{});
}

// The tensor, or a copy where accesses of 16 bytes would not meet its rows.
inline ops::Tensor with_aligned_rows(const ops::Tensor& tensor) {
  const auto multiple = static_cast<std::int64_t>(16 / tensor.element_size());
  bool aligned = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (std::int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    aligned = aligned && (tensor.size(i) <= 1 || tensor.stride(i) % multiple == 0);
  }
  if (aligned) return tensor;
  ops::Tensor copy = ops::contiguous_like(tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

template <class T>
Heads<const T> heads_of(const core::RowsView& view) {
  return {static_cast<const T*>(view.data), view.batch_stride, view.head_stride, view.row_stride};
}

inline AttentionRules rules_of(const core::AttentionProblem& problem) {
  const core::BiasView& bias = problem.bias;
  return {
      {problem.batch, static_cast<std::int32_t>(problem.heads),
       static_cast<std::int32_t>(problem.key_heads),
       static_cast<std::int32_t>(problem.query_length),
       static_cast<std::int32_t>(problem.key_length), static_cast<std::int32_t>(problem.head_dim)},
      problem.scale,
      problem.causal,
      problem.key_padding,
      problem.key_padding_stride,
      {bias.data, bias.type, bias.strides[0], bias.strides[1], bias.strides[2], bias.strides[3]},
      {problem.dropout, problem.seed, problem.offset}};
}

inline int shift_of(const core::AttentionProblem& problem) {
  int shift = 4;
  while (1 << shift < problem.layout.block) ++shift;
  return shift;
}

// The lists of `count` rows or columns of blocks, which the device checks before it uses them.
inline BlockLists checked_lists(const CheckLists& check, int shift) {
  launch(check.op, check, check.heads * check.count);
  return {check.pointers, check.blocks, check.heads == 1 ? 0 : check.count + 1, shift};
}

inline BlockLists lists_by_rows(const char* op, const core::AttentionProblem& problem,
                                std::int64_t total) {
  const core::BlockRows& layout = problem.layout;
  return checked_lists(
      {op, "row_pointers", "columns", layout.pointers, layout.columns, layout.heads,
       layout.row_blocks, total, ops::blocks_of(problem.key_length, layout.block)},
      shift_of(problem));
}

inline BlockLists lists_by_columns(const char* op, const core::AttentionProblem& problem,
                                   const ops::TransposedBlocks& blocks, std::int64_t total) {
  const core::BlockRows& layout = problem.layout;
  return checked_lists(
      {op, "column_pointers", "rows", blocks.column_pointers, blocks.rows, layout.heads,
       ops::blocks_of(problem.key_length, layout.block), total, layout.row_blocks},
      shift_of(problem));
}

}  // namespace zero_ext::cuda
