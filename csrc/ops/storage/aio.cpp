// zero_ext::aio_*: reads and writes of files that go on while the caller does. Engines are int64
// handles, transfers by numbers of the caller.
#include <unistd.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "../../core/aio/io_engine.h"
#include "../op_registration.h"
#include "handle_registry.h"

namespace zero_ext::ops {
namespace {

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
struct OpenEngine {
  explicit OpenEngine(std::shared_ptr<core::IoEngine> made) : engine(std::move(made)) {}

  OpenFiles files;
  NumberedTransfers transfers;
  // Last, so that it goes first: it waits for the transfers, whose owners the handles hold.
  const std::shared_ptr<core::IoEngine> engine;
};

HandleRegistry<OpenEngine>& registry() { return HandleRegistry<OpenEngine>::of_process("aio"); }

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
  auto engine = core::IoEngine::make(
      backend, {.queue_depth = queue_depth, .block_bytes = block_bytes, .io_threads = io_threads});
  const auto chosen = std::string(core::backend_name(engine->options().backend));
  registry().put(handle, std::make_shared<OpenEngine>(std::move(engine)));
  return chosen;
}

void aio_close(std::int64_t handle) { registry().remove(handle); }

void aio_close_all() { registry().clear(); }

void aio_read_(std::int64_t handle, std::int64_t transfer, const std::string& path,
               std::int64_t offset, const Tensor& tensor) {
  check_layout(tensor, {"aio_read_", "tensor"});
  const auto open = registry().get(handle);
  open->transfers.add(transfer, open->engine->read(open->files.get(path, false), offset,
                                                   bytes_into(tensor), owner_of(tensor)));
}

void aio_write_(std::int64_t handle, std::int64_t transfer, const std::string& path,
                std::int64_t offset, const Tensor& tensor) {
  check_layout(tensor, {"aio_write_", "tensor"});
  const auto open = registry().get(handle);
  open->transfers.add(transfer, open->engine->write(open->files.get(path, true), offset,
                                                    bytes_of(tensor), owner_of(tensor)));
}

void aio_wait(std::int64_t handle, std::int64_t transfer) {
  registry().get(handle)->transfers.wait(transfer);
}

void aio_inject_fault(std::int64_t handle, bool writing, std::int64_t after, std::int64_t result,
                      std::int64_t times) {
  const auto direction = writing ? core::IoDirection::kWrite : core::IoDirection::kRead;
  registry().get(handle)->engine->inject_fault({direction, after, result, times});
}

}  // namespace

ZERO_EXT_OPS(CompositeExplicitAutograd) {
  ops("aio_backends() -> str", TORCH_BOX(&aio_backends));
  ops("aio_open(int handle, str backend, int queue_depth, int block_bytes, int io_threads) -> str",
      TORCH_BOX(&aio_open));
  ops("aio_close(int handle) -> ()", TORCH_BOX(&aio_close));
  ops("aio_close_all() -> ()", TORCH_BOX(&aio_close_all));
  ops("aio_wait(int handle, int transfer) -> ()", TORCH_BOX(&aio_wait));
  ops("aio_inject_fault(int handle, bool writing, int after, int result, int times) -> ()",
      TORCH_BOX(&aio_inject_fault));
}

ZERO_EXT_OPS(CPU) {
  ops("aio_read_(int handle, int transfer, str path, int offset, Tensor(a!) tensor) -> ()",
      TORCH_BOX(&aio_read_));
  ops("aio_write_(int handle, int transfer, str path, int offset, Tensor tensor) -> ()",
      TORCH_BOX(&aio_write_));
}

}  // namespace zero_ext::ops
