// zero_ext::store_*: bytes on files or block devices, read and written asynchronously. Stores are
// int64 handles.
#include "../../core/store/striped_store.h"

#include <memory>
#include <mutex>
#include <vector>

#include "../op_registration.h"
#include "handle_registry.h"
#include "state_stream.h"

namespace zero_ext::ops {
namespace {

// What a handle stands for.
struct OpenStore {
  core::Backend backend;
  std::shared_ptr<core::StripedStore> store;
  NumberedTransfers transfers;
};

HandleRegistry<OpenStore>& registry() { return HandleRegistry<OpenStore>::of_process("store"); }

void store_open(std::int64_t handle, std::vector<std::string> paths, const std::string& backend,
                std::vector<std::int64_t> engine_sizes, std::int64_t stripe_bytes, bool checksum,
                bool block_devices) {
  STD_TORCH_CHECK(
      engine_sizes.size() == 3,
      "store_open: engine_sizes: expected 3 entries (queue_depth, block_bytes, io_threads), got ",
      engine_sizes.size(), ". Pass these.");
  registry().remove(handle);
  auto engine = core::IoEngine::make(backend, {.queue_depth = engine_sizes[0],
                                               .block_bytes = engine_sizes[1],
                                               .io_threads = engine_sizes[2]});
  auto open = std::make_shared<OpenStore>();
  open->backend = engine->options().backend;
  open->store = std::make_shared<core::StripedStore>(
      std::move(engine), paths,
      core::StripedStoreOptions{
          .stripe_bytes = stripe_bytes, .checksum = checksum, .block_devices = block_devices});
  registry().put(handle, std::move(open));
}

void store_reserve(std::int64_t handle, std::int64_t nbytes, bool zeros) {
  registry().get(handle)->store->reserve(nbytes, zeros);
}

std::int64_t store_allocate(std::int64_t handle, std::int64_t nbytes) {
  return registry().get(handle)->store->allocate(nbytes);
}

void store_release(std::int64_t handle, std::int64_t offset) {
  registry().get(handle)->store->release(offset);
}

void store_read_(std::int64_t handle, const Tensor& tensor, std::int64_t offset,
                 std::int64_t transfer) {
  check_layout(tensor, {"store_read_", "tensor"});
  const auto open = registry().get(handle);
  open->transfers.add(transfer, open->store->read(offset, bytes_into(tensor), owner_of(tensor)));
}

void store_write(std::int64_t handle, const Tensor& tensor, std::int64_t offset,
                 std::int64_t transfer) {
  check_layout(tensor, {"store_write", "tensor"});
  const auto open = registry().get(handle);
  open->transfers.add(transfer, open->store->write(offset, bytes_of(tensor), owner_of(tensor)));
}

// cuFile's driver, open while any store uses it.
std::shared_ptr<core::CuFileDriver> cufile_driver() {
  static std::mutex mutex;
  static std::weak_ptr<core::CuFileDriver> current;
  const std::lock_guard lock(mutex);
  auto driver = current.lock();
  if (driver == nullptr) {
    driver = std::make_shared<core::CuFileDriver>(core::load_cufile());
    current = driver;
  }
  return driver;
}

// Empty if the libraries are there, else the reason. It starts nothing.
std::string cufile_unavailable_reason() {
  try {
    core::load_cufile();
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void store_open_direct(std::int64_t handle) {
  registry().get(handle)->store->open_direct(cufile_driver());
}

void store_close_direct(std::int64_t handle) { registry().get(handle)->store->close_direct(); }

void check_contiguous(const char* op, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), op,
                  ": argument 'tensor': expected a contiguous one, got one with other strides. "
                  "Pass tensor.contiguous().");
}

void store_read_direct_(std::int64_t handle, const Tensor& tensor, std::int64_t offset,
                        std::int64_t transfer) {
  check_contiguous("store_read_direct_", tensor);
  const auto open = registry().get(handle);
  open->transfers.add(transfer, open->store->read(offset, bytes_into(tensor), owner_of(tensor),
                                                  core::MemoryKind::kDevice));
}

void store_write_direct(std::int64_t handle, const Tensor& tensor, std::int64_t offset,
                        std::int64_t transfer) {
  check_contiguous("store_write_direct", tensor);
  const auto open = registry().get(handle);
  open->transfers.add(transfer, open->store->write(offset, bytes_of(tensor), owner_of(tensor),
                                                   core::MemoryKind::kDevice));
}

void store_wait(std::int64_t handle, std::int64_t transfer) {
  registry().get(handle)->transfers.wait(transfer);
}

// The backend's name, then path and "why not direct" of each device, each followed by a NUL, which
// no path holds.
std::string store_devices(std::int64_t handle) {
  const auto open = registry().get(handle);
  std::string text = std::string(core::backend_name(open->backend)) + '\0';
  for (const auto& device : open->store->stats().devices) {
    text += device.path + '\0' + device.direct_io_refusal + '\0';
  }
  return text;
}

void store_stats_(std::int64_t handle, const Tensor& counts) {
  const Argument argument{"store_stats_", "counts"};
  check_dtype(counts, argument, ScalarType::Long);
  check_flat(counts, argument, 6);
  const auto open = registry().get(handle);
  const core::StripedStoreStats stats = open->store->stats();
  auto* const values = static_cast<std::int64_t*>(counts.mutable_data_ptr());
  values[0] = open->store->alignment();
  values[1] = stats.capacity;
  values[2] = stats.live_bytes;
  values[3] = stats.bytes_read;
  values[4] = stats.bytes_written;
  values[5] = stats.largest_free;
}

void store_inject_fault(std::int64_t handle, bool writing, std::int64_t after, std::int64_t result,
                        std::int64_t times) {
  const auto direction = writing ? core::IoDirection::kWrite : core::IoDirection::kRead;
  registry().get(handle)->store->inject_fault({direction, after, result, times});
}

void store_close(std::int64_t handle) { registry().remove(handle); }

}  // namespace

std::shared_ptr<core::ByteStore> store_of(std::int64_t handle) {
  return registry().get(handle)->store;
}

ZERO_EXT_OPS(CompositeExplicitAutograd) {
  ops("store_open(int handle, str[] paths, str backend, int[] engine_sizes, int stripe_bytes, bool "
      "checksum, bool block_devices) -> ()",
      TORCH_BOX(&store_open));
  ops("store_reserve(int handle, int nbytes, bool zeros) -> ()", TORCH_BOX(&store_reserve));
  ops("store_allocate(int handle, int nbytes) -> SymInt", TORCH_BOX(&store_allocate));
  ops("store_release(int handle, int offset) -> ()", TORCH_BOX(&store_release));
  ops("store_wait(int handle, int transfer) -> ()", TORCH_BOX(&store_wait));
  ops("cufile_unavailable_reason() -> str", TORCH_BOX(&cufile_unavailable_reason));
  ops("store_open_direct(int handle) -> ()", TORCH_BOX(&store_open_direct));
  ops("store_close_direct(int handle) -> ()", TORCH_BOX(&store_close_direct));
  // On every device: what they are given are addresses of its memory.
  ops("store_read_direct_(int handle, Tensor(a!) tensor, int offset, int transfer) -> ()",
      TORCH_BOX(&store_read_direct_));
  ops("store_write_direct(int handle, Tensor tensor, int offset, int transfer) -> ()",
      TORCH_BOX(&store_write_direct));
  ops("store_devices(int handle) -> str", TORCH_BOX(&store_devices));
  ops("store_inject_fault(int handle, bool writing, int after, int result, int times) -> ()",
      TORCH_BOX(&store_inject_fault));
  ops("store_close(int handle) -> ()", TORCH_BOX(&store_close));
}

ZERO_EXT_OPS(CPU) {
  ops("store_read_(int handle, Tensor(a!) tensor, int offset, int transfer) -> ()",
      TORCH_BOX(&store_read_));
  ops("store_write(int handle, Tensor tensor, int offset, int transfer) -> ()",
      TORCH_BOX(&store_write));
  ops("store_stats_(int handle, Tensor(a!) counts) -> ()", TORCH_BOX(&store_stats_));
}

}  // namespace zero_ext::ops
