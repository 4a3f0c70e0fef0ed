// zero_ext::state_stream_adam_: one Adam step over state in a store.
#include "../../core/offload/adam_stream.h"
#include "../../core/optimizers/adam_rule.h"
#include "../op_registration.h"
#include "../optimizers/optimizer_arg_checks.h"
#include "state_stream.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "state_stream_adam_";
constexpr std::int64_t kColumns = 6;

core::AdamMoments moments_of(const StateStream& stream) {
  for (const auto moments :
       {core::AdamMoments::float32, core::AdamMoments::bfloat16, core::AdamMoments::blockwise8}) {
    if (stream.fields == core::adam_fields(moments)) return moments;
  }
  STD_TORCH_CHECK(false, kOp,
                  ": stream: its fields are not those of Adam. Open it with the fields of Adam, "
                  "see state_stream_open.");
}

void check_shapes(const Tensor& ranges, const std::vector<Tensor>& params,
                  const std::vector<Tensor>& grads, const Tensor& segments, const Tensor& hyper) {
  check_dtype(ranges, {kOp, "ranges"}, ScalarType::Long);
  STD_TORCH_CHECK(ranges.dim() == 2 && ranges.size(1) == kColumns, kOp,
                  ": argument 'ranges': expected shape [R, 6] (elements, offset of the state, of "
                  "the gradient, of the "
                  "parameters, number of segments, offset of the state after the step), got ",
                  shape_text(ranges), ". Reshape it.");
  const auto count = static_cast<std::size_t>(ranges.size(0));
  STD_TORCH_CHECK(params.size() == count && grads.size() == count, kOp,
                  ": params and grads: expected one of each for ", count, " ranges, got ",
                  params.size(), " and ", grads.size(), ". Pass that many.");
  check_layout(segments, {kOp, "segments"});
  check_layout(hyper, {kOp, "hyper"});
  const auto* const rows = ranges.const_data_ptr<std::int64_t>();
  std::int64_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t of_range = rows[kColumns * i + 4];
    STD_TORCH_CHECK(of_range >= 0, kOp, ": ranges[", i, "]: expected at least 0 segments, got ",
                    of_range, ". Correct the column.");
    total += of_range;
  }
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(0) == total && hyper.dim() == 2 &&
                      hyper.size(0) == total,
                  kOp, ": arguments 'segments' and 'hyper': expected a row for each of the ", total,
                  " segments of ranges, got shapes ", shape_text(segments), " and ",
                  shape_text(hyper), ". Pass that many rows.");
}

// Whether a tensor is the data itself; if not it is empty and says the dtype of what is stored.
bool in_memory(const Tensor& tensor, const Argument& argument, std::int64_t elements,
               std::int64_t offset) {
  if (offset >= 0) {
    check_flat(tensor, argument, 0);
    return false;
  }
  check_flat(tensor, argument, elements);
  return true;
}

Tensor rows_of(Tensor tensor, std::int64_t first, std::int64_t count) {
  return torch::stable::narrow(tensor, 0, first, count);
}

// Row of `ranges`: elements, offsets in the store of state, gradient and parameters, number of
// segments, offset of the state after the step.
core::AdamRange read_range(const StateStream& stream, const std::int64_t* row, std::size_t index,
                           const Tensor& param, const Tensor& grad) {
  const Argument grad_argument{kOp, "grads[" + std::to_string(index) + "]"};
  const Argument param_argument{kOp, "params[" + std::to_string(index) + "]"};
  const std::int64_t elements = row[0];
  core::AdamRange range{stream.layout(elements),
                        row[1],
                        {check_numeric(grad, grad_argument), nullptr, row[2]},
                        std::nullopt,
                        {},
                        row[5]};
  if (in_memory(grad, grad_argument, elements, row[2])) {
    range.gradient.data = static_cast<const std::byte*>(grad.const_data_ptr());
  }
  const core::NumericType param_type = check_numeric(param, param_argument);
  if (row[3] < 0 && param.numel() == 0) return range;
  range.param = {param_type, nullptr, row[3]};
  if (in_memory(param, param_argument, elements, row[3])) {
    range.param->data = static_cast<std::byte*>(param.mutable_data_ptr());
  }
  return range;
}

void state_stream_adam(std::int64_t handle, const Tensor& ranges, const std::vector<Tensor>& params,
                       const std::vector<Tensor>& grads, const Tensor& segments,
                       const Tensor& hyper, const Tensor& grad_scale, const Tensor& counters,
                       const OptionalTensor& non_finite) {
  check_counters(counters, kOp);
  std::int32_t* const flag = read_flag(kOp, non_finite);
  check_shapes(ranges, params, grads, segments, hyper);
  const std::shared_ptr<StateStream> stream = stream_of(handle);
  const core::AdamMoments moments = moments_of(*stream);
  const float scale = read_scale(kOp, grad_scale);
  const auto* const rows = ranges.const_data_ptr<std::int64_t>();
  std::vector<core::AdamRange> work;
  std::vector<std::vector<core::AdamSegment>> prepared;
  std::vector<MemoryRange> memory;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const std::int64_t* const row = rows + kColumns * static_cast<std::int64_t>(i);
    const std::string prefix = std::string(kOp) + ": range " + std::to_string(i);
    prepared.push_back(read_segments<core::AdamRule>(prefix.c_str(),
                                                     rows_of(segments, first, row[4]),
                                                     rows_of(hyper, first, row[4]), scale, row[0]));
    first += row[4];
    work.push_back(read_range(*stream, row, i, params[i], grads[i]));
    memory.push_back(memory_range(params[i], {kOp, "params[" + std::to_string(i) + "]"}));
    memory.push_back(memory_range(grads[i], {kOp, "grads[" + std::to_string(i) + "]"}));
  }
  for (std::size_t i = 0; i < work.size(); ++i) work[i].segments = prepared[i];
  if (flag != nullptr) memory.push_back(memory_range(*non_finite, {kOp, "non_finite"}));
  check_disjoint(std::move(memory));
  core::AdaptiveThreading threads([](std::int64_t begin, std::int64_t end, std::int64_t grain,
                                     const core::RangeFunction& function) {
    torch::stable::parallel_for(begin, end, grain, function);
  });
  const auto run = [&threads](std::int64_t count, std::int64_t grain,
                              const core::PipelineCounters& so_far,
                              const core::RangeFunction& function) {
    threads.run(count, grain, so_far, function);
  };
  add_counters(counters, core::adam_stream(*stream->store, stream->ring, work, moments, run, flag));
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("state_stream_adam_(int handle, Tensor ranges, Tensor(a!)[] params, Tensor[] grads, Tensor "
      "segments, Tensor hyper, Tensor grad_scale, Tensor(b!) counters, Tensor(c!)? "
      "non_finite=None) -> ()",
      TORCH_BOX(&state_stream_adam));
}

}  // namespace zero_ext::ops
