// zero_ext::block_sparse_attention_forward and block_sparse_attention_backward on the CPU.
#include "../../core/attention/attention.h"

#include <tuple>

#include "../../core/flat/flat_buffer.h"
#include "../op_registration.h"
#include "attention_arg_checks.h"

namespace zero_ext::ops {
namespace {

core::Workers torch_workers() {
  return {static_cast<std::int64_t>(torch::stable::get_num_threads()),
          [](std::int64_t workers, const std::function<void(std::int64_t)>& work) {
            torch::stable::parallel_for(0, workers, 1, [&](std::int64_t begin, std::int64_t end) {
              for (std::int64_t worker = begin; worker < end; ++worker) work(worker);
            });
          }};
}

// The indices of a layout are read by the kernel, so their values are checked too.
core::AttentionArgs read_with_values(const char* op, const AttentionTensors& tensors,
                                     const AttentionOptions& options) {
  const core::AttentionArgs args = read_attention(op, tensors, options);
  const std::string error =
      core::layout_error(args.layout, tensors.columns.numel(), args.column_blocks());
  STD_TORCH_CHECK(error.empty(), op, ": ", error);
  return args;
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const Tensor& row_pointers, const Tensor& columns,
                                   const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor& key_padding, const OptionalTensor& bias,
                                   std::int64_t block, bool causal, double scale, double dropout,
                                   std::int64_t seed, std::int64_t offset) {
  const core::AttentionArgs args =
      read_with_values("block_sparse_attention_forward",
                       {query, key, value, row_pointers, columns, key_padding, bias},
                       {block, causal, scale, dropout, seed, offset});
  const Tensor output = contiguous_like(query);
  const Tensor logsumexp =
      torch::stable::empty({args.batch, args.heads, args.query_length}, ScalarType::Float);
  core::attention_forward(args, {output.mutable_data_ptr(), logsumexp.mutable_data_ptr<float>()},
                          torch_workers());
  return {output, logsumexp};
}

// Rounds what was summed in float32 to the bias's dtype.
Tensor rounded(const Tensor& sums, const core::AttentionArgs& args, const Tensor& bias) {
  if (args.bias.type == core::NumericType::float32) return sums;
  const Tensor result = contiguous_like(bias);
  core::copy_cast(result.mutable_data_ptr(), args.bias.type, sums.const_data_ptr(),
                  core::NumericType::float32, sums.numel());
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& logsumexp, const Tensor& row_pointers,
    const Tensor& columns, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor& key_padding, const OptionalTensor& bias, std::int64_t block, bool causal,
    double scale, double dropout, std::int64_t seed, std::int64_t offset, bool need_grad_bias) {
  constexpr const char* op = "block_sparse_attention_backward";
  const core::AttentionArgs args =
      read_with_values(op, {query, key, value, row_pointers, columns, key_padding, bias},
                       {block, causal, scale, dropout, seed, offset});
  STD_TORCH_CHECK(
      !need_grad_bias || bias, op,
      ": argument 'bias': expected a tensor, as its gradient is needed, got None. Pass the bias.");
  core::AttentionGradArgs gradients;
  gradients.grad_output = read_rows_like_query(op, "grad_output", grad_output, query);
  gradients.output = read_rows_like_query(op, "output", output, query);
  gradients.logsumexp = read_logsumexp(op, logsumexp, args);
  const Tensor grad_query = contiguous_like(query);
  const Tensor grad_key = contiguous_like(key);
  const Tensor grad_value = contiguous_like(value);
  gradients.query = grad_query.mutable_data_ptr();
  gradients.key = grad_key.mutable_data_ptr();
  gradients.value = grad_value.mutable_data_ptr();
  Tensor grad_bias =
      torch::stable::empty({0}, need_grad_bias ? ScalarType::Float : query.scalar_type());
  if (need_grad_bias) {
    grad_bias = torch::stable::empty(bias->sizes(), ScalarType::Float);
    gradients.bias = grad_bias.mutable_data_ptr<float>();
  }
  core::attention_backward(args, gradients, torch_workers());
  if (need_grad_bias) grad_bias = rounded(grad_bias, args, *bias);
  return {grad_query, grad_key, grad_value, grad_bias};
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("block_sparse_attention_forward(Tensor query, Tensor key, Tensor value, Tensor row_pointers, "
      "Tensor columns, Tensor? column_pointers, Tensor? rows, Tensor? key_padding, Tensor? bias, "
      "int block, bool causal, float scale, float dropout, int seed, int offset) -> (Tensor "
      "output, Tensor logsumexp)",
      TORCH_BOX(&forward));
  ops("block_sparse_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor logsumexp, Tensor row_pointers, Tensor columns, Tensor? "
      "column_pointers, Tensor? rows, Tensor? key_padding, Tensor? bias, int block, bool causal, "
      "float scale, float dropout, int seed, int offset, bool need_grad_bias) -> (Tensor "
      "grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)",
      TORCH_BOX(&backward));
}

}  // namespace zero_ext::ops
