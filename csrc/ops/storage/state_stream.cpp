// zero_ext::state_stream_*: optimizer state in a store, streamed through a ring of host memory.
// Streams are int64 handles.
#include "state_stream.h"

#include <memory>

#include "../../core/offload/state_read_write.h"
#include "handle_registry.h"
#include "open_stores.h"

namespace zero_ext::ops {
namespace {

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
    const std::int64_t expected = (elements + shape.elements - 1) / shape.elements * shape.bytes;
    const std::int64_t bytes =
        tensors[i].numel() * static_cast<std::int64_t>(tensors[i].element_size());
    STD_TORCH_CHECK(bytes == expected, label(argument), "expected ", expected, " bytes for field ",
                    fields[i], " of ", elements, " elements, got ", bytes,
                    ". Pass another tensor.");
    // Empty tensors may have no memory, which would mean a field that is not asked for.
    if (bytes > 0) memory[field] = static_cast<std::byte*>(tensors[i].mutable_data_ptr());
  }
  return memory;
}

template <auto access>
void access_slice(const char* op, std::int64_t handle, std::int64_t offset, std::int64_t elements,
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

void state_stream_read(std::int64_t handle, std::int64_t offset, std::int64_t elements,
                       std::int64_t begin, std::int64_t end,
                       const std::vector<std::int64_t>& fields, const std::vector<Tensor>& tensors,
                       const Tensor& counters) {
  access_slice<core::read_state>("state_stream_read_", handle, offset, elements, begin, end, fields,
                                 tensors, counters);
}

void state_stream_write(std::int64_t handle, std::int64_t offset, std::int64_t elements,
                        std::int64_t begin, std::int64_t end,
                        const std::vector<std::int64_t>& fields, const std::vector<Tensor>& tensors,
                        const Tensor& counters) {
  access_slice<core::write_state>("state_stream_write_", handle, offset, elements, begin, end,
                                  fields, tensors, counters);
}

}  // namespace

std::shared_ptr<StateStream> stream_of(std::int64_t handle) { return registry().get(handle); }

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "state_stream_open(int handle, int store, int staging_buffer_bytes, int[] field_bytes, "
      "int[] field_elements) -> ()");
  library.def("state_stream_close(int handle) -> ()");
  library.def("state_stream_chunk_elements(int handle) -> SymInt");
  library.def("state_stream_extent_bytes(int handle, int elements) -> SymInt");
  library.def(
      "state_stream_fill_(int handle, int offset, Tensor master, Tensor(a!) counters) -> ()");
  library.def(
      "state_stream_read_(int handle, int offset, int elements, int begin, int end, int[] fields, "
      "Tensor(a!)[] tensors, Tensor(b!) counters) -> ()");
  library.def(
      "state_stream_write_(int handle, int offset, int elements, int begin, int end, int[] fields, "
      "Tensor[] tensors, Tensor(a!) counters) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("state_stream_open", TORCH_BOX(&state_stream_open));
  library.impl("state_stream_close", TORCH_BOX(&state_stream_close));
  library.impl("state_stream_chunk_elements", TORCH_BOX(&state_stream_chunk_elements));
  library.impl("state_stream_extent_bytes", TORCH_BOX(&state_stream_extent_bytes));
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("state_stream_fill_", TORCH_BOX(&state_stream_fill));
  library.impl("state_stream_read_", TORCH_BOX(&state_stream_read));
  library.impl("state_stream_write_", TORCH_BOX(&state_stream_write));
}

}  // namespace zero_ext::ops
