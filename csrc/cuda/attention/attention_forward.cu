// zero_ext::block_sparse_attention_forward on CUDA devices.
#include <tuple>

#include "attention_forward_kernel.h"
#include "attention_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::OptionalTensor;
using ops::Tensor;

constexpr const char* kOp = "block_sparse_attention_forward";

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const Tensor& row_pointers, const Tensor& columns,
                                   const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor& key_padding, const OptionalTensor& bias,
                                   std::int64_t block, bool causal, double scale, double dropout,
                                   std::int64_t seed, std::int64_t offset) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const ops::AttentionOptions options{block, causal, scale, dropout, seed, offset};
  ops::read_attention(kOp, {query, key, value, row_pointers, columns, key_padding, bias}, options);
  const Tensor queries = with_aligned_rows(query);
  const Tensor keys = with_aligned_rows(key);
  const Tensor values = with_aligned_rows(value);
  const core::AttentionArgs args = ops::read_attention(
      kOp, {queries, keys, values, row_pointers, columns, key_padding, bias}, options);
  const Tensor output = ops::contiguous_like(query);
  const Tensor logsumexp =
      torch::stable::empty({args.batch, args.heads, args.query_length}, ops::ScalarType::Float,
                           std::nullopt, query.device());
  if (logsumexp.numel() == 0) return {output, logsumexp};
  const DeviceLayout layout = DeviceLayout::by_rows(kOp, args, columns.numel());
  with_type(args.type, [&]<class T>(std::type_identity<T>) {
    with_head_dim(args.head_dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
      using Kernel = AttentionForward<T, kDim>;
      const DeviceLayout::Unions rows = layout.unions(Kernel::Tiling::kRows, query);
      launch_attention(kOp, Kernel{params_of(args), rows.lists, heads_of<T>(args.query),
                                   heads_of<T>(args.key), heads_of<T>(args.value),
                                   output_rows<T>(output), logsumexp.mutable_data_ptr<float>()});
    });
  });
  return {output, logsumexp};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("block_sparse_attention_forward", TORCH_BOX(&forward));
}

}  // namespace zero_ext::cuda
