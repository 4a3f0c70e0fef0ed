#include "attention_arg_checks.h"

#include <cmath>

namespace zero_ext::ops {
namespace {

core::RowsView rows_view(const Tensor& tensor, const Argument& argument) {
  STD_TORCH_CHECK(tensor.numel() == 0 || tensor.size(3) == 1 || tensor.stride(3) == 1,
                  label(argument), "expected stride 1 in the last dimension, got ",
                  tensor.stride(3), ". Pass tensor.contiguous().");
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void check_four(const Tensor& tensor, const Argument& argument) {
  check_device(tensor, argument);
  STD_TORCH_CHECK(tensor.dim() == 4, label(argument),
                  "expected shape [batch, heads, length, head dim], got ", shape_text(tensor),
                  ". Reshape it.");
}

void check_same_dtype(const Tensor& tensor, const Argument& argument, const Tensor& query) {
  STD_TORCH_CHECK(tensor.scalar_type() == query.scalar_type(), label(argument), "expected dtype ",
                  torch::headeronly::toString(query.scalar_type()), " as of query, got ",
                  torch::headeronly::toString(tensor.scalar_type()), ". Convert one of them.");
}

void check_sizes(const char* op, const AttentionTensors& tensors) {
  const Tensor& query = tensors.query;
  const Tensor& key = tensors.key;
  check_four(query, {op, "query"});
  check_four(key, {op, "key"});
  check_four(tensors.value, {op, "value"});
  numeric_type(query, {op, "query"});
  check_same_dtype(key, {op, "key"}, query);
  check_same_dtype(tensors.value, {op, "value"}, query);
  const std::int64_t dim = query.size(3);
  STD_TORCH_CHECK(
      dim >= core::kMinHeadDim && dim <= core::kMaxHeadDim && dim % core::kHeadDimStep == 0, op,
      ": head dim: expected a multiple of 8 from 16 to 256, got ", dim,
      ". Pad it with zeros and pass the scale of the unpadded one.");
  STD_TORCH_CHECK(key.size(0) == query.size(0) && key.size(3) == dim, label({op, "key"}),
                  "expected batch and head dim of query's shape ", shape_text(query),
                  ", got shape ", shape_text(key), ". Pass tensors of one batch.");
  for (std::int64_t i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(tensors.value.size(i) == key.size(i), label({op, "value"}),
                    "expected key's shape ", shape_text(key), ", got ", shape_text(tensors.value),
                    ". Pass one value for each key.");
  }
  STD_TORCH_CHECK(key.size(1) > 0 ? query.size(1) % key.size(1) == 0 : query.size(1) == 0,
                  label({op, "key"}), "expected a number of heads that divides query's ",
                  query.size(1), ", got ", key.size(1), ". Repeat the heads of key and value.");
  constexpr std::int64_t most = 1LL << 30;
  STD_TORCH_CHECK(
      query.size(2) <= most && key.size(2) <= most && query.size(0) * query.size(1) <= most, op,
      ": query and key: expected lengths and batch * heads of at most 2^30, got shapes ",
      shape_text(query), " and ", shape_text(key), ". Split the batch.");
}

core::BlockRows read_layout(const char* op, const AttentionTensors& tensors, std::int64_t block) {
  STD_TORCH_CHECK(block == 16 || block == 32 || block == 64 || block == 128, op,
                  ": block: expected 16, 32, 64 or 128, got ", block, ". Pass one of these.");
  check_dtype(tensors.row_pointers, {op, "row_pointers"}, ScalarType::Int);
  check_dtype(tensors.columns, {op, "columns"}, ScalarType::Int);
  check_flat(tensors.columns, {op, "columns"}, tensors.columns.numel());
  const std::int64_t heads = tensors.query.size(1);
  const std::int64_t row_blocks = core::ceil_div(tensors.query.size(2), block);
  const Tensor& pointers = tensors.row_pointers;
  STD_TORCH_CHECK(pointers.dim() == 2 && (pointers.size(0) == 1 || pointers.size(0) == heads) &&
                      pointers.size(1) == row_blocks + 1,
                  label({op, "row_pointers"}), "expected shape [1 or ", heads, ", ", row_blocks + 1,
                  "] for ", heads, " query heads, ", tensors.query.size(2),
                  " queries and blocks of ", block, ", got ", shape_text(pointers),
                  ". Build the layout for this length.");
  return {pointers.const_data_ptr<std::int32_t>(), tensors.columns.const_data_ptr<std::int32_t>(),
          pointers.size(0), row_blocks, block};
}

void read_padding(const char* op, const Tensor& padding, core::AttentionArgs& args) {
  const Argument argument{op, "key_padding"};
  check_device(padding, argument);
  STD_TORCH_CHECK(padding.scalar_type() == ScalarType::Bool, label(argument),
                  "expected dtype Bool, true where a key may be attended, got ",
                  torch::headeronly::toString(padding.scalar_type()), ". Convert it.");
  STD_TORCH_CHECK(
      padding.dim() == 2 && padding.size(0) == args.batch && padding.size(1) == args.key_length,
      label(argument), "expected shape [", args.batch, ", ", args.key_length,
      "] (batch, key length), got ", shape_text(padding), ". Reshape it.");
  STD_TORCH_CHECK(args.key_length <= 1 || padding.stride(1) == 1, label(argument),
                  "expected stride 1 in the last dimension, got ", padding.stride(1),
                  ". Pass tensor.contiguous().");
  args.key_padding = padding.const_data_ptr<bool>();
  args.key_padding_stride = padding.stride(0);
}

void read_bias(const char* op, const Tensor& bias, core::AttentionArgs& args) {
  const Argument argument{op, "bias"};
  check_four(bias, argument);
  args.bias.type = numeric_type(bias, argument);
  args.bias.data = bias.const_data_ptr();
  const std::int64_t full[4] = {args.batch, args.heads, args.query_length, args.key_length};
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(bias.size(i) == full[i] || bias.size(i) == 1, label(argument),
                    "expected shape [", full[0], " or 1, ", full[1], " or 1, ", full[2], " or 1, ",
                    full[3], " or 1] (batch, heads, queries, keys), got ", shape_text(bias),
                    ". Reshape it.");
    args.bias.sizes[i] = bias.size(i);
    args.bias.strides[i] = bias.size(i) == 1 ? 0 : bias.stride(i);
  }
}

}  // namespace

Tensor contiguous_like(const Tensor& tensor) {
  return torch::stable::empty(tensor.sizes(), tensor.scalar_type(), std::nullopt, tensor.device());
}

core::AttentionArgs read_attention(const char* op, const AttentionTensors& tensors,
                                   const AttentionOptions& options) {
  check_sizes(op, tensors);
  core::AttentionArgs args;
  args.type = numeric_type(tensors.query, {op, "query"});
  args.batch = tensors.query.size(0);
  args.heads = tensors.query.size(1);
  args.key_heads = tensors.key.size(1);
  args.query_length = tensors.query.size(2);
  args.key_length = tensors.key.size(2);
  args.head_dim = tensors.query.size(3);
  args.query = rows_view(tensors.query, {op, "query"});
  args.key = rows_view(tensors.key, {op, "key"});
  args.value = rows_view(tensors.value, {op, "value"});
  args.layout = read_layout(op, tensors, options.block);
  if (tensors.key_padding) read_padding(op, *tensors.key_padding, args);
  if (tensors.bias) read_bias(op, *tensors.bias, args);
  STD_TORCH_CHECK(std::isfinite(options.scale), op, ": scale: expected a finite number, got ",
                  options.scale, ". Pass 1/sqrt(head dim), for instance.");
  STD_TORCH_CHECK(options.dropout >= 0 && options.dropout < 1, op,
                  ": dropout: expected at least 0 and below 1, got ", options.dropout,
                  ". Pass a probability.");
  STD_TORCH_CHECK(options.offset >= 0 && options.offset < (1LL << 32), op,
                  ": offset: expected at least 0 and below 2^32, got ", options.offset,
                  ". Pass the offset that the forward op used.");
  args.scale = static_cast<float>(options.scale);
  args.causal = options.causal;
  args.dropout = options.dropout;
  args.seed = static_cast<std::uint64_t>(options.seed);
  args.offset = static_cast<std::uint32_t>(options.offset);
  return args;
}

core::RowsView read_rows_like_query(const char* op, const char* name, const Tensor& tensor,
                                    const Tensor& query) {
  check_four(tensor, {op, name});
  check_same_dtype(tensor, {op, name}, query);
  for (std::int64_t i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(tensor.size(i) == query.size(i), label({op, name}), "expected query's shape ",
                    shape_text(query), ", got ", shape_text(tensor),
                    ". Pass what the forward op returned.");
  }
  return rows_view(tensor, {op, name});
}

const float* read_logsumexp(const char* op, const Tensor& logsumexp,
                            const core::AttentionArgs& args) {
  const Argument argument{op, "logsumexp"};
  check_dtype(logsumexp, argument, ScalarType::Float);
  STD_TORCH_CHECK(logsumexp.dim() == 3 && logsumexp.size(0) == args.batch &&
                      logsumexp.size(1) == args.heads && logsumexp.size(2) == args.query_length,
                  label(argument), "expected shape [", args.batch, ", ", args.heads, ", ",
                  args.query_length, "], got ", shape_text(logsumexp),
                  ". Pass what the forward op returned.");
  return logsumexp.const_data_ptr<float>();
}

TransposedBlocks read_transposed(const char* op, const OptionalTensor& column_pointers,
                                 const OptionalTensor& rows, const core::AttentionArgs& args,
                                 std::int64_t total_blocks) {
  STD_TORCH_CHECK(column_pointers && rows, op,
                  ": arguments 'column_pointers' and 'rows': expected the transposed layout, got "
                  "None. Pass it.");
  check_dtype(*column_pointers, {op, "column_pointers"}, ScalarType::Int);
  check_dtype(*rows, {op, "rows"}, ScalarType::Int);
  check_flat(*rows, {op, "rows"}, total_blocks);
  const std::int64_t columns = args.column_blocks();
  STD_TORCH_CHECK(column_pointers->dim() == 2 && column_pointers->size(0) == args.layout.heads &&
                      column_pointers->size(1) == columns + 1,
                  label({op, "column_pointers"}), "expected shape [", args.layout.heads, ", ",
                  columns + 1, "] (layout heads, column blocks + 1), got ",
                  shape_text(*column_pointers), ". Build the transposed layout for this length.");
  return {column_pointers->const_data_ptr<std::int32_t>(), rows->const_data_ptr<std::int32_t>()};
}

}  // namespace zero_ext::ops
