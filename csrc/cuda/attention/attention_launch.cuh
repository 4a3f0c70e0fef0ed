// What the launches of block-sparse attention share: from the tensors of an op to the arguments of
// kernels, and a block of threads for each of their pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "../../ops/attention/attention_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "../common/thread_block_launch.cuh"
#include "attention_layout.h"
#include "attention_output.h"
#include "attention_scores.h"
#include "attention_tiling.h"

namespace zero_ext::cuda {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Tiling::kThreads, Kernel::Tiling::kMinBlocks)
    run_attention(const __grid_constant__ Kernel kernel) {
  extern __shared__ __align__(16) std::byte memory[];
  kernel(DeviceThreadBlock(memory));
}

template <class Kernel>
void launch_attention(const char* op, const Kernel& kernel) {
  const std::int64_t blocks = kernel.blocks();
  if (blocks == 0) return;
  STD_TORCH_CHECK(blocks <= INT32_MAX, op, ": layout: expected at most ", INT32_MAX,
                  " pieces over all batches and heads in a launch, got ", blocks,
                  ". Split the batch.");
  constexpr int bytes = Kernel::template shared_bytes<DeviceThreadBlock>();
  static_assert(bytes <= kMaxSharedBytes);
  const Launcher launcher(op);
  check(op, cudaFuncSetAttribute(run_attention<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes));
  run_attention<Kernel>
      <<<static_cast<unsigned>(blocks), Kernel::Tiling::kThreads, bytes, launcher.stream>>>(kernel);
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

template <class T>
OutputRows<T> output_rows(const ops::Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.size(1),
          static_cast<std::int32_t>(tensor.size(2)), static_cast<std::int32_t>(tensor.size(3))};
}

inline AttentionParams params_of(const core::AttentionArgs& args) {
  const core::BiasView& bias = args.bias;
  return {
      {static_cast<std::int32_t>(args.batch), static_cast<std::int32_t>(args.heads),
       static_cast<std::int32_t>(args.key_heads), static_cast<std::int32_t>(args.query_length),
       static_cast<std::int32_t>(args.key_length), static_cast<std::int32_t>(args.head_dim)},
      args.scale,
      args.causal,
      args.key_padding,
      args.key_padding_stride,
      {bias.data, bias.type, bias.strides[0], bias.strides[1], bias.strides[2], bias.strides[3]},
      {args.dropout, args.seed, args.offset}};
}

inline int shift_of(const core::AttentionArgs& args) {
  int shift = 4;
  while (1 << shift < args.layout.block) ++shift;
  return shift;
}

// One of the two copies of a layout, which the device checks before it is used.
class DeviceLayout {
 public:
  DeviceLayout(const char* op, const CheckLists& layout, const core::AttentionArgs& args)
      : op_(op), layout_(layout), shift_(shift_of(args)) {
    launch(op, layout, layout.heads * layout.count);
  }

  static DeviceLayout by_rows(const char* op, const core::AttentionArgs& args, std::int64_t total) {
    const core::BlockRows& layout = args.layout;
    return {op,
            {core::device_op(op), DeviceArgument::row_pointers, DeviceArgument::columns,
             device_errors(op), layout.pointers, layout.columns, layout.heads, layout.row_blocks,
             total, args.column_blocks()},
            args};
  }
  static DeviceLayout by_columns(const char* op, const core::AttentionArgs& args,
                                 const ops::TransposedBlocks& blocks, std::int64_t total) {
    const core::BlockRows& layout = args.layout;
    return {op,
            {core::device_op(op), DeviceArgument::column_pointers, DeviceArgument::rows,
             device_errors(op), blocks.column_pointers, blocks.rows, layout.heads,
             args.column_blocks(), total, layout.row_blocks},
            args};
  }

  struct Unions {
    ops::Tensor memory;
    BlockLists lists;
  };
  // For blocks of threads of `rows` rows.
  Unions unions(int rows, const ops::Tensor& like) const {
    MergeLists merge = MergeLists::of(layout_, shift_, rows);
    const std::int64_t extents = 2 * layout_.heads * merge.unions();
    const ops::Tensor memory = torch::stable::empty({extents + layout_.total}, ops::ScalarType::Int,
                                                    std::nullopt, like.device());
    merge.extents = memory.mutable_data_ptr<std::int32_t>();
    merge.entries = merge.extents + extents;
    launch_blocks(op_, merge);
    return {memory, merge.result(shift_, rows)};
  }

 private:
  const char* op_;
  CheckLists layout_;
  int shift_;
};

}  // namespace zero_ext::cuda
