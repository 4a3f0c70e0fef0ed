// zero_ext::block_sparse_attention_backward on CUDA devices.
#include <tuple>

#include "attention_dkdv_kernel.h"
#include "attention_dq_kernel.h"
#include "attention_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::OptionalTensor;
using ops::Tensor;

constexpr const char* kOp = "block_sparse_attention_backward";

Tensor zeros(std::vector<std::int64_t> sizes, const Tensor& like) {
  Tensor result = torch::stable::empty(sizes, ops::ScalarType::Float, std::nullopt, like.device());
  torch::stable::zero_(result);
  return result;
}

// Sums of the bias's gradient, and which kernel adds to them.
struct BiasSums {
  Tensor sums;  // float32, of the bias's sizes; a row for every query where it has one entry
  BiasGradient by_rows;
  BiasGradient by_columns;
  std::int32_t batches_each;  // that share a bias
  bool all_heads;             // share it

  static BiasSums none(const Tensor& like) {
    return {torch::stable::empty({0}, like.scalar_type(), std::nullopt, like.device()),
            {},
            {},
            1,
            false};
  }

  // Where queries share a bias and keys do not, columns are summed up, else rows.
  static BiasSums of(const core::AttentionArgs& args, const Tensor& like) {
    const std::int64_t* sizes = args.bias.sizes;
    const bool by_columns = sizes[2] == 1 && sizes[3] > 1;
    const std::int64_t rows = by_columns ? 1 : args.query_length;
    BiasSums result{zeros({sizes[0], sizes[1], rows, sizes[3]}, like),
                    {},
                    {},
                    sizes[0] == 1 ? static_cast<std::int32_t>(args.batch) : 1,
                    sizes[1] == 1};
    const BiasGradient target{
        result.sums.mutable_data_ptr<float>(), sizes[0] == 1 ? 0 : sizes[1] * rows * sizes[3],
        sizes[1] == 1 ? 0 : rows * sizes[3], by_columns ? 0 : sizes[3], sizes[3] == 1 ? 0 : 1};
    (by_columns ? result.by_columns : result.by_rows) = target;
    return result;
  }

  // In the bias's shape and dtype.
  Tensor gradient(const Tensor& bias) const {
    Tensor result = ops::contiguous_like(bias);
    Tensor total = sums;
    if (sums.size(2) != bias.size(2)) {
      const std::int64_t queries[] = {2};
      total = torch::stable::sum(sums, torch::headeronly::IntHeaderOnlyArrayRef(queries, 1), true);
    }
    torch::stable::copy_(result, total);
    return result;
  }
};

// What of the backward does not depend on the types of kernels.
struct Backward {
  const core::AttentionArgs& args;
  DeviceLayout by_rows;
  DeviceLayout by_columns;
  core::RowsView grad_output;
  core::RowsView output;
  const float* logsumexp;
  float* reference;
  float* delta;
  const Tensor& grad_query;
  const Tensor& grad_key;
  const Tensor& grad_value;
  const BiasSums& bias;

  template <class T, int kDim>
  void run() const {
    const AttentionParams params = params_of(args);
    const PrepareGradients<T> prepare{
        params.sizes, heads_of<T>(grad_output), heads_of<T>(output), logsumexp, reference, delta};
    launch_warps(kOp, prepare, prepare.work());
    const GradientInputs<T> inputs{params,
                                   heads_of<T>(args.query),
                                   heads_of<T>(args.key),
                                   heads_of<T>(args.value),
                                   heads_of<T>(grad_output),
                                   reference,
                                   delta};
    const bool own = bias.by_rows.data != nullptr;
    using RowKernel = AttentionDq<T, kDim>;
    const DeviceLayout::Unions rows = by_rows.unions(RowKernel::Tiling::kRows, grad_query);
    launch_attention(kOp, RowKernel{{inputs, rows.lists, bias.by_rows, own ? bias.batches_each : 1,
                                     own && bias.all_heads ? params.sizes.query_heads : 1},
                                    output_rows<T>(grad_query)});
    if constexpr (kDim <= 128) {
      columns<T, kDim, DkDvOutputs::both>(inputs);
    } else {
      columns<T, kDim, DkDvOutputs::keys>(inputs);
      columns<T, kDim, DkDvOutputs::values>(inputs);
    }
  }

 private:
  template <class T, int kDim, DkDvOutputs kOutputs>
  void columns(const GradientInputs<T>& inputs) const {
    const bool own = bias.by_columns.data != nullptr;
    using Kernel = AttentionDkDv<T, kDim, kOutputs>;
    const DeviceLayout::Unions unions = by_columns.unions(Kernel::Tiling::kRows, grad_key);
    launch_attention(kOp,
                     Kernel{{inputs, unions.lists, bias.by_columns, own ? bias.batches_each : 1,
                             own && bias.all_heads ? inputs.params.sizes.key_heads : 1},
                            output_rows<T>(grad_key),
                            output_rows<T>(grad_value)});
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& logsumexp, const Tensor& row_pointers,
    const Tensor& columns, const OptionalTensor& column_pointers, const OptionalTensor& rows,
    const OptionalTensor& key_padding, const OptionalTensor& bias, std::int64_t block, bool causal,
    double scale, double dropout, std::int64_t seed, std::int64_t offset, bool need_grad_bias) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const ops::AttentionOptions options{block, causal, scale, dropout, seed, offset};
  ops::read_attention(kOp, {query, key, value, row_pointers, columns, key_padding, bias}, options);
  ops::read_rows_like_query(kOp, "grad_output", grad_output, query);
  STD_TORCH_CHECK(
      !need_grad_bias || bias, kOp,
      ": argument 'bias': expected a tensor, as its gradient is needed, got None. Pass the bias.");
  const Tensor inputs[] = {with_aligned_rows(query), with_aligned_rows(key),
                           with_aligned_rows(value), with_aligned_rows(grad_output)};
  const core::AttentionArgs args = ops::read_attention(
      kOp, {inputs[0], inputs[1], inputs[2], row_pointers, columns, key_padding, bias}, options);
  const ops::TransposedBlocks transposed =
      ops::read_transposed(kOp, column_pointers, rows, args, columns.numel());
  const core::RowsView outputs = ops::read_rows_like_query(kOp, "output", output, query);
  const float* sums = ops::read_logsumexp(kOp, logsumexp, args);
  const Tensor grads[] = {ops::contiguous_like(query), ops::contiguous_like(key),
                          ops::contiguous_like(value)};
  const BiasSums bias_sums = need_grad_bias ? BiasSums::of(args, query) : BiasSums::none(query);
  // Without a batch or a head all of them are empty.
  if (args.batch > 0 && args.heads > 0) {
    const std::int64_t count = logsumexp.numel();
    const Tensor scratch =
        torch::stable::empty({2, count}, ops::ScalarType::Float, std::nullopt, query.device());
    float* reference = scratch.mutable_data_ptr<float>();
    const Backward run{args,
                       DeviceLayout::by_rows(kOp, args, columns.numel()),
                       DeviceLayout::by_columns(kOp, args, transposed, columns.numel()),
                       ops::read_rows_like_query(kOp, "grad_output", inputs[3], query),
                       outputs,
                       sums,
                       reference,
                       reference + count,
                       grads[0],
                       grads[1],
                       grads[2],
                       bias_sums};
    with_type(args.type, [&]<class T>(std::type_identity<T>) {
      with_head_dim(args.head_dim,
                    [&]<int kDim>(std::integral_constant<int, kDim>) { run.run<T, kDim>(); });
    });
  }
  return {grads[0], grads[1], grads[2],
          need_grad_bias ? bias_sums.gradient(*bias) : bias_sums.sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("block_sparse_attention_backward", TORCH_BOX(&backward));
}

}  // namespace zero_ext::cuda
