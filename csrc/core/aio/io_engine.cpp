#include "io_engine.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "../base/error_text.h"
#include "submitter.h"
#include "transfer.h"

namespace zero_ext::core {

struct IoEngine::Components {
  IoEngineOptions options;
  std::shared_ptr<FaultPlan> faults;
  std::vector<std::unique_ptr<Submitter>> submitters;
};

namespace {

constexpr std::string_view kAutomatic = "auto";
constexpr std::int64_t kBlockMultiple = 4096;
constexpr std::int64_t kLargestBlock = std::int64_t{1} << 30;

struct BackendKind {
  Backend backend;
  std::string_view name;
  std::unique_ptr<IoQueue> (*make_queue)(int depth);
};

constexpr std::array<BackendKind, 3> kBackends = {{
    {Backend::kIoUring, "io_uring", &make_io_uring_queue},
    {Backend::kLibaio, "libaio", &make_libaio_queue},
    {Backend::kThreads, "threads", &make_thread_queue},
}};

const BackendKind& kind_of(Backend backend) {
  const auto* const found =
      std::ranges::find_if(kBackends, [&](const auto& kind) { return kind.backend == backend; });
  if (found == kBackends.end())
    throw make_error("I/O engine: backend ", static_cast<int>(backend),
                     " is unknown. Pass one of probe_backends().");
  return *found;
}

void check_range(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  require(value >= least && value <= most, name, ": expected ", least, " to ", most, ", got ",
          value, ". Pass one of these.");
}

// Throws std::runtime_error that names the option out of range, the value seen and those wanted.
void check_options(const IoEngineOptions& options) {
  check_range("queue_depth", options.queue_depth, 1, 1024);
  check_range("io_threads", options.io_threads, 1, 16);
  check_range("block_bytes", options.block_bytes, kBlockMultiple, kLargestBlock);
  require(options.block_bytes % kBlockMultiple == 0, "block_bytes: expected a multiple of ",
          kBlockMultiple, ", got ", options.block_bytes, ". Round it up.");
}

}  // namespace

std::string_view backend_name(Backend backend) { return kind_of(backend).name; }

std::vector<BackendReport> probe_backends() {
  std::vector<BackendReport> reports;
  for (const BackendKind& kind : kBackends) {
    BackendReport report{kind.backend, true, ""};
    try {
      kind.make_queue(1);
    } catch (const std::runtime_error& error) {
      report.available = false;
      report.reason = error.what();
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

std::shared_ptr<IoEngine> IoEngine::make(const IoEngineOptions& options) {
  check_options(options);
  const BackendKind& kind = kind_of(options.backend);
  try {
    return make_of(options, kind.make_queue);
  } catch (const std::runtime_error& error) {
    throw make_error("I/O backend ", kind.name, ": it is not available (", error.what(),
                     "). See ops.aio_backends() for those that are.");
  }
}

std::shared_ptr<IoEngine> IoEngine::make(std::string_view backend, IoEngineOptions options) {
  check_options(options);
  std::string refusals;
  for (const BackendKind& kind : kBackends) {
    if (backend != kAutomatic && backend != kind.name) continue;
    options.backend = kind.backend;
    try {
      return make(options);
    } catch (const std::runtime_error& error) {
      if (backend != kAutomatic) throw;
      refusals += std::string(refusals.empty() ? "" : "; ") + error.what();
    }
  }
  require(backend != kAutomatic, "I/O engine: no backend is available (", refusals,
          "). Raise the limits that they name.");
  throw make_error("backend: expected 'auto', 'io_uring', 'libaio' or 'threads', got '", backend,
                   "'. Pass one of these.");
}

std::shared_ptr<IoEngine> IoEngine::make(const IoEngineOptions& options, const BlockMover& mover) {
  check_options(options);
  return make_of(options, [&](int depth) { return make_thread_queue(depth, mover); });
}

std::shared_ptr<IoEngine> IoEngine::make_of(const IoEngineOptions& options,
                                            const QueueMaker& make_queue) {
  Components components{options, std::make_shared<FaultPlan>(), {}};
  for (std::int64_t i = 0; i < options.io_threads; ++i) {
    components.submitters.push_back(std::make_unique<Submitter>(
        make_queue(static_cast<int>(options.queue_depth)), components.faults));
  }
  return std::make_shared<IoEngine>(std::move(components));
}

IoEngine::IoEngine(Components&& components)
    : options_(components.options),
      process_(::getpid()),
      faults_(std::move(components.faults)),
      submitters_(std::move(components.submitters)) {}

IoEngine::~IoEngine() {
  if (::getpid() == process_) return;
  // A forked child has none of the threads that could be joined; its exit frees what is left.
  for (auto& submitter : submitters_) static_cast<void>(submitter.release());
}

std::shared_ptr<TransferHandle> IoEngine::read(std::shared_ptr<IoFile> file, std::int64_t offset,
                                               std::span<std::byte> into,
                                               std::shared_ptr<void> owner) {
  return start({std::move(file), IoDirection::kRead, offset, into, std::move(owner)});
}

std::shared_ptr<TransferHandle> IoEngine::write(std::shared_ptr<IoFile> file, std::int64_t offset,
                                                std::span<const std::byte> from,
                                                std::shared_ptr<void> owner) {
  if (file && !file->writable()) {
    throw make_error("writing '", file->path(),
                     "': it was opened for reading only. Open it for writing.");
  }
  const std::span<std::byte> memory{const_cast<std::byte*>(from.data()), from.size()};
  return start({std::move(file), IoDirection::kWrite, offset, memory, std::move(owner)});
}

std::shared_ptr<TransferHandle> IoEngine::start(TransferRequest&& request) {
  check_process();
  require(request.file != nullptr, "I/O engine: expected a file to transfer, got none. Open one.");
  const auto most = std::numeric_limits<std::int64_t>::max() - kLargestBlock;
  if (request.offset < 0 || static_cast<std::int64_t>(request.memory.size()) > most ||
      request.offset > most - static_cast<std::int64_t>(request.memory.size())) {
    throw make_error("transfer of ", request.memory.size(), " bytes at offset ", request.offset,
                     " of '", request.file->path(),
                     "': no file reaches there. Pass a smaller offset.");
  }
  auto transfer = std::make_shared<Transfer>(std::move(request), options_.block_bytes);
  const auto count = static_cast<std::uint32_t>(submitters_.size());
  const auto shares = static_cast<std::uint32_t>(std::min<std::int64_t>(transfer->blocks(), count));
  const std::uint32_t first = next_submitter_.fetch_add(shares, std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < shares; ++i) {
    submitters_[(first + i) % count]->enqueue({transfer, i, shares});
  }
  return transfer;
}

void IoEngine::inject_fault(FaultRule rule) {
  check_process();
  faults_->add(rule);
}

void IoEngine::check_process() const {
  require(::getpid() == process_, "I/O engine: expected process ", process_,
          ", where its threads are, got its forked child ", ::getpid(), ". Make an engine there.");
}

}  // namespace zero_ext::core
