// zero_ext::aio_*: reads and writes of files that go on while the caller does. Engines are int64
// handles, transfers by numbers of the caller.
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "../../core/aio/io_engine.h"
#include "../checks.h"
#include "handle_registry.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kAutomatic = "auto";

// Each takes two descriptors, of the 1,024 that a process has by default.
constexpr std::size_t kMaxOpenFiles = 64;

// Files stay open from one transfer to the next, the ones used last.
class OpenFiles {
 public:
  std::shared_ptr<core::IoFile> get(const std::string& path, bool writing) {
    const std::lock_guard lock(mutex_);
    files_.remove_if([&](const auto& file) {
      return file->path() == path && (file->replaced() || (writing && !file->writable()));
    });
    const auto found = std::find_if(files_.begin(), files_.end(),
                                    [&](const auto& file) { return file->path() == path; });
    if (found != files_.end()) {
      files_.splice(files_.begin(), files_, found);
    } else {
      files_.push_front(open(path, writing));
      if (files_.size() > kMaxOpenFiles) files_.pop_back();
    }
    return files_.front();
  }

 private:
  static std::shared_ptr<core::IoFile> open(const std::string& path, bool writing) {
    using Mode = core::IoFile::Mode;
    if (!writing) return core::IoFile::open(path, Mode::kRead, true);
    const bool exists = ::access(path.c_str(), F_OK) == 0;
    return core::IoFile::open(path, exists ? Mode::kReadWrite : Mode::kCreate, true);
  }

  std::mutex mutex_;
  std::list<std::shared_ptr<core::IoFile>> files_;
};

// What a handle stands for.
class OpenEngine {
 public:
  explicit OpenEngine(std::shared_ptr<core::IoEngine> engine) : engine_(std::move(engine)) {}

  core::IoEngine& engine() { return *engine_; }
  OpenFiles& files() { return files_; }

  template <class Start>
  void start(std::int64_t number, const Start& start) {
    const std::lock_guard lock(mutex_);
    transfers_[number].push_back(start());
  }

  // All of them have ended when the first error is thrown.
  void wait(std::int64_t number) {
    std::unique_lock lock(mutex_);
    const auto node = transfers_.extract(number);
    lock.unlock();
    if (node.empty()) return;
    std::exception_ptr first;
    for (const auto& transfer : node.mapped()) {
      try {
        transfer->wait();
      } catch (const std::runtime_error&) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  }

 private:
  OpenFiles files_;
  std::mutex mutex_;
  std::unordered_map<std::int64_t, std::vector<std::shared_ptr<core::TransferHandle>>> transfers_;
  // Last, so that it goes first: it waits for the transfers, whose owners the handles hold.
  const std::shared_ptr<core::IoEngine> engine_;
};

HandleRegistry<OpenEngine>& registry() { return HandleRegistry<OpenEngine>::of_process("aio"); }

int checked_int(const char* name, std::int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= 1 << 20, "aio_open: ", name, ": expected 0 to ", 1 << 20,
                  ", got ", value, ". Pass a smaller one.");
  return static_cast<int>(value);
}

std::shared_ptr<core::IoEngine> make_preferred(core::IoEngineOptions options) {
  std::string refusals;
  for (const core::BackendReport& report : core::probe_backends()) {
    options.backend = report.backend;
    try {
      return core::IoEngine::make(options);
    } catch (const std::runtime_error& error) {
      refusals += std::string(refusals.empty() ? "" : "; ") + error.what();
    }
  }
  throw std::runtime_error("aio_open: no backend is available (" + refusals +
                           "). Raise the limits that they name.");
}

// A line for each, "name" if it is available, else "name: reason".
std::string aio_backends() {
  std::string lines;
  for (const core::BackendReport& report : core::probe_backends()) {
    lines += core::backend_name(report.backend);
    if (!report.available) lines += ": " + report.reason;
    lines += '\n';
  }
  return lines;
}

std::string aio_open(std::int64_t handle, const std::string& backend, std::int64_t queue_depth,
                     std::int64_t block_bytes, std::int64_t io_threads) {
  core::IoEngineOptions options;
  options.queue_depth = checked_int("queue_depth", queue_depth);
  options.block_bytes = block_bytes;
  options.io_threads = checked_int("io_threads", io_threads);
  core::check_options(options);
  const auto named = core::backend_by_name(backend);
  STD_TORCH_CHECK(named || backend == kAutomatic,
                  "aio_open: backend: expected 'auto', 'io_uring', 'libaio' or 'threads', got '",
                  backend, "'. Pass one of these.");
  if (named) options.backend = *named;
  auto engine = named ? core::IoEngine::make(options) : make_preferred(options);
  const auto chosen = std::string(core::backend_name(engine->options().backend));
  registry().put(handle, std::make_shared<OpenEngine>(std::move(engine)));
  return chosen;
}

void aio_close(std::int64_t handle) { registry().remove(handle); }

void aio_close_all() { registry().clear(); }

std::shared_ptr<void> owner_of(const Tensor& tensor) { return std::make_shared<Tensor>(tensor); }

std::size_t nbytes(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}

void aio_read_(std::int64_t handle, std::int64_t transfer, const std::string& path,
               std::int64_t offset, const Tensor& tensor) {
  check_layout(tensor, {"aio_read_", "tensor"});
  const auto open = registry().get(handle);
  auto file = open->files().get(path, false);
  auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  open->start(transfer, [&] {
    return open->engine().read(std::move(file), offset, {data, nbytes(tensor)}, owner_of(tensor));
  });
}

void aio_write_(std::int64_t handle, std::int64_t transfer, const std::string& path,
                std::int64_t offset, const Tensor& tensor) {
  check_layout(tensor, {"aio_write_", "tensor"});
  const auto open = registry().get(handle);
  auto file = open->files().get(path, true);
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  open->start(transfer, [&] {
    return open->engine().write(std::move(file), offset, {data, nbytes(tensor)}, owner_of(tensor));
  });
}

void aio_wait(std::int64_t handle, std::int64_t transfer) {
  registry().get(handle)->wait(transfer);
}

void aio_inject_fault(std::int64_t handle, bool writing, std::int64_t after, std::int64_t result,
                      std::int64_t times) {
  const auto direction = writing ? core::IoDirection::kWrite : core::IoDirection::kRead;
  registry().get(handle)->engine().inject_fault({direction, after, result, times});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("aio_backends() -> str");
  library.def(
      "aio_open(int handle, str backend, int queue_depth, int block_bytes, int io_threads) -> str");
  library.def("aio_close(int handle) -> ()");
  library.def("aio_close_all() -> ()");
  library.def("aio_read_(int handle, int transfer, str path, int offset, Tensor(a!) tensor) -> ()");
  library.def("aio_write_(int handle, int transfer, str path, int offset, Tensor tensor) -> ()");
  library.def("aio_wait(int handle, int transfer) -> ()");
  library.def("aio_inject_fault(int handle, bool writing, int after, int result, int times) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CompositeExplicitAutograd, library) {
  library.impl("aio_backends", TORCH_BOX(&aio_backends));
  library.impl("aio_open", TORCH_BOX(&aio_open));
  library.impl("aio_close", TORCH_BOX(&aio_close));
  library.impl("aio_close_all", TORCH_BOX(&aio_close_all));
  library.impl("aio_wait", TORCH_BOX(&aio_wait));
  library.impl("aio_inject_fault", TORCH_BOX(&aio_inject_fault));
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("aio_read_", TORCH_BOX(&aio_read_));
  library.impl("aio_write_", TORCH_BOX(&aio_write_));
}

}  // namespace zero_ext::ops
