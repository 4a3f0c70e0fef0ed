// zero_ext::state_stream_*: optimizer state in a store, streamed through a ring of host memory.
// Streams are int64 handles.
#include "state_stream.h"

#include <array>
#include <memory>

#include "../../core/offload/state_read_write.h"
#include "../op_registration.h"
#include "handle_registry.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kCounters = 7;

HandleRegistry<StateStream>& registry() {
  return HandleRegistry<StateStream>::of_process("state_stream");
}

void state_stream_open(std::int64_t handle, std::int64_t store, std::int64_t staging_buffer_bytes,
                       const std::vector<std::int64_t>& field_bytes,
                       const std::vector<std::int64_t>& field_elements) {
  STD_TORCH_CHECK(field_bytes.size() == field_elements.size(),
                  "state_stream_open: field_elements: expected one entry for each of the ",
                  field_bytes.size(), " fields of field_bytes, got ", field_elements.size(),
                  ". Pass lists of one length.");
  std::vector<core::StateField> fields;
  for (std::size_t i = 0; i < field_bytes.size(); ++i) {
    fields.push_back({field_bytes[i], field_elements[i]});
  }
  registry().put(handle,
                 std::make_shared<StateStream>(store_of(store), staging_buffer_bytes, fields));
}

void state_stream_close(std::int64_t handle) { registry().remove(handle); }

std::int64_t state_stream_chunk_elements(std::int64_t handle) {
  return registry().get(handle)->chunk_elements;
}

std::int64_t state_stream_extent_bytes(std::int64_t handle, std::int64_t elements) {
  return registry().get(handle)->layout(elements).extent_bytes();
}

void state_stream_fill(std::int64_t handle, std::int64_t offset, const Tensor& master,
                       const Tensor& counters) {
  constexpr const char* kOp = "state_stream_fill_";
  const core::NumericType type = check_numeric(master, {kOp, "master"});
  check_flat(master, {kOp, "master"}, master.numel());
  check_counters(counters, kOp);
  const std::shared_ptr<StateStream> stream = registry().get(handle);
  add_counters(counters, core::fill_state(
                             *stream->store, stream->ring, stream->layout(master.numel()), offset,
                             static_cast<const std::byte*>(master.const_data_ptr()), type));
}

// The caller's memory for each field of a slice; null for fields not in `fields`.
std::vector<std::byte*> slice_memory(const StateStream& stream, const char* op,
                                     std::int64_t elements, const std::vector<std::int64_t>& fields,
                                     const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(fields.size() == tensors.size(), op, ": tensors: expected one for each of ",
                  fields.size(), " fields, got ", tensors.size(), ". Pass that many.");
  std::vector<std::byte*> memory(stream.fields.size(), nullptr);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const Argument argument{op, "tensors[" + std::to_string(i) + "]"};
    const auto field = static_cast<std::size_t>(fields[i]);
    STD_TORCH_CHECK(fields[i] >= 0 && field < memory.size() && memory[field] == nullptr, op,
                    ": fields[", i, "]: expected each of 0 to ", memory.size() - 1,
                    " at most once, got ", fields[i], ". Name other fields.");
    check_layout(tensors[i], argument);
    const core::StateField& shape = stream.fields[field];
    const std::int64_t expected = core::ceil_div(elements, shape.elements) * shape.bytes;
    const auto bytes = static_cast<std::int64_t>(byte_count(tensors[i]));
    STD_TORCH_CHECK(bytes == expected, label(argument), "expected ", expected, " bytes for field ",
                    fields[i], " of ", elements, " elements, got ", bytes,
                    ". Pass another tensor.");
    // Empty tensors may have no memory, which would mean a field that is not asked for.
    if (bytes > 0) memory[field] = static_cast<std::byte*>(tensors[i].mutable_data_ptr());
  }
  return memory;
}

constexpr char kRead[] = "state_stream_read_";
constexpr char kWrite[] = "state_stream_write_";

template <auto access, const char* op>
void access_slice(std::int64_t handle, std::int64_t offset, std::int64_t elements,
                  std::int64_t begin, std::int64_t end, const std::vector<std::int64_t>& fields,
                  const std::vector<Tensor>& tensors, const Tensor& counters) {
  check_counters(counters, op);
  const std::shared_ptr<StateStream> stream = registry().get(handle);
  STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= elements, op,
                  ": elements: expected a part of [0, ", elements, "), got [", begin, ", ", end,
                  "). Pass other bounds.");
  const core::ChunkLayout layout = stream->layout(elements);
  const core::StateSlice slice{layout, offset, begin, end,
                               slice_memory(*stream, op, end - begin, fields, tensors)};
  add_counters(counters, access(*stream->store, stream->ring, slice));
}

}  // namespace

void check_counters(const Tensor& counters, const char* op) {
  check_dtype(counters, {op, "counters"}, ScalarType::Long);
  check_flat(counters, {op, "counters"}, kCounters);
}

void add_counters(const Tensor& counters, const core::PipelineCounters& passed) {
  const std::array<std::int64_t, kCounters> values{passed.bytes_read,
                                                   passed.bytes_written,
                                                   passed.padding_read,
                                                   passed.padding_written,
                                                   passed.waiting_for_reads.count(),
                                                   passed.waiting_for_writes.count(),
                                                   passed.computing.count()};
  auto* const totals = counters.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < values.size(); ++i) totals[i] += values[i];
}

std::shared_ptr<StateStream> stream_of(std::int64_t handle) { return registry().get(handle); }

ZERO_EXT_OPS(CompositeExplicitAutograd) {
  ops("state_stream_open(int handle, int store, int staging_buffer_bytes, int[] field_bytes, int[] "
      "field_elements) -> ()",
      TORCH_BOX(&state_stream_open));
  ops("state_stream_close(int handle) -> ()", TORCH_BOX(&state_stream_close));
  ops("state_stream_chunk_elements(int handle) -> SymInt", TORCH_BOX(&state_stream_chunk_elements));
  ops("state_stream_extent_bytes(int handle, int elements) -> SymInt",
      TORCH_BOX(&state_stream_extent_bytes));
}

ZERO_EXT_OPS(CPU) {
  ops("state_stream_fill_(int handle, int offset, Tensor master, Tensor(a!) counters) -> ()",
      TORCH_BOX(&state_stream_fill));
  ops("state_stream_read_(int handle, int offset, int elements, int begin, int end, int[] fields, "
      "Tensor(a!)[] tensors, Tensor(b!) counters) -> ()",
      TORCH_BOX((&access_slice<core::read_state, kRead>)));
  ops("state_stream_write_(int handle, int offset, int elements, int begin, int end, int[] fields, "
      "Tensor[] tensors, Tensor(a!) counters) -> ()",
      TORCH_BOX((&access_slice<core::write_state, kWrite>)));
}

}  // namespace zero_ext::ops
