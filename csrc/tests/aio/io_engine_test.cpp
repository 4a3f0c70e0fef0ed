// Transfers through every backend of this machine, against a model in memory.
#include "../../core/aio/io_engine.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <thread>

#include "../test_support.h"
#include "aio_support.h"

namespace zero_ext::core {
namespace {

using testing::Bytes;
using testing::content;
using testing::error_of;
using testing::expect_in;
using testing::fill_file;
using testing::fresh_generator;
using testing::Memory;
using testing::random_bytes;
using testing::ScratchFolder;

class AioEngine : public ::testing::TestWithParam<Backend> {
 protected:
  std::shared_ptr<IoEngine> make(int queue_depth = 8, std::int64_t block_bytes = 16384,
                                 int io_threads = 2) const {
    return IoEngine::make({GetParam(), queue_depth, block_bytes, io_threads});
  }
  std::shared_ptr<IoFile> create(const std::string& name, bool direct = true) const {
    return IoFile::open(folder_.file(name), IoFile::Mode::kCreate, direct);
  }

  const ScratchFolder folder_;
};

// Cut points of [0, size): neighbors share pages, and most pieces are not aligned.
std::vector<std::size_t> random_cuts(std::mt19937_64& generator, std::size_t size) {
  std::vector<std::size_t> cuts = {0, size};
  for (int i = 0; i < 12; ++i) {
    const std::size_t cut = generator() % size;
    cuts.push_back(generator() % 2 == 0 ? cut : cut / 4096 * 4096);
  }
  std::ranges::sort(cuts);
  return cuts;
}

TEST_P(AioEngine, RandomTransfersMatchAModel) {
  auto generator = fresh_generator();
  for (int round = 0; round < 10; ++round) {
    const auto engine = make(1 + static_cast<int>(generator() % 12),
                             4096 * (1 + static_cast<std::int64_t>(generator() % 8)),
                             1 + static_cast<int>(generator() % 3));
    const auto file = create(std::to_string(round), generator() % 3 != 0);
    Bytes model(200'000 + generator() % 200'000);
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<Memory> sources;
      std::vector<std::shared_ptr<TransferHandle>> handles;
      const auto cuts = random_cuts(generator, model.size());
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const Bytes bytes = random_bytes(generator, cuts[i + 1] - cuts[i]);
        std::ranges::copy(bytes, model.begin() + static_cast<std::ptrdiff_t>(cuts[i]));
        const std::size_t shift = generator() % 2 == 0 ? cuts[i] % 4096 : generator() % 64;
        sources.emplace_back(bytes, shift);
        handles.push_back(
            engine->write(file, static_cast<std::int64_t>(cuts[i]), sources.back().span()));
      }
      for (const auto& handle : handles) handle->wait();
    }
    Memory read(model.size(), generator() % 2 * 512);
    std::vector<std::shared_ptr<TransferHandle>> handles;
    const auto cuts = random_cuts(generator, model.size());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      handles.push_back(engine->read(file, static_cast<std::int64_t>(cuts[i]),
                                     read.span().subspan(cuts[i], cuts[i + 1] - cuts[i])));
    }
    for (const auto& handle : handles) handle->wait();
    ASSERT_EQ(read.copy(), model) << "round " << round;
    ASSERT_EQ(content(file->path()), model) << "round " << round;
  }
}

TEST_P(AioEngine, ThreadsShareOneEngine) {
  const auto engine = make();
  const auto file = create("shared");
  constexpr std::size_t kSlice = 150'000;
  auto generator = fresh_generator();
  const Bytes bytes = random_bytes(generator, 4 * kSlice);
  std::vector<std::jthread> threads;
  for (std::size_t chunk = 0; chunk < 4; ++chunk) {
    threads.emplace_back([&, chunk] {
      const Memory source(std::span<const std::byte>(bytes).subspan(chunk * kSlice, kSlice), 512);
      Memory back(kSlice);
      const auto offset = static_cast<std::int64_t>(chunk * kSlice);
      engine->write(file, offset, source.span())->wait();
      engine->read(file, offset, back.span())->wait();
      EXPECT_EQ(back.copy(), source.copy());
    });
  }
  threads.clear();
  EXPECT_EQ(content(file->path()), bytes);
}

TEST_P(AioEngine, AnEmptyTransferIsDone) {
  const auto engine = make();
  const auto handle = engine->write(create("empty"), 10, {});
  EXPECT_TRUE(handle->done());
  handle->wait();
}

TEST_P(AioEngine, HoldsTheOwnerUntilWaitedFor) {
  const auto engine = make();
  const auto file = create("owned");
  auto owner = std::make_shared<Memory>(100'000);
  const std::weak_ptr<Memory> watch = owner;
  const auto bytes = owner->span();
  const auto handle = engine->write(file, 0, bytes, std::move(owner));
  EXPECT_FALSE(watch.expired());
  while (!handle->done()) std::this_thread::yield();
  EXPECT_FALSE(watch.expired());
  handle->wait();
  EXPECT_TRUE(watch.expired());
}

TEST_P(AioEngine, DestructionWaitsForWhatIsInFlight) {
  auto generator = fresh_generator();
  const auto source = std::make_shared<Memory>(random_bytes(generator, 3'000'000));
  const auto file = create("abandoned");
  const auto handle = make(2, 4096, 2)->write(file, 0, source->span());
  EXPECT_TRUE(handle->done());
  make(2, 4096, 2)->write(file, 0, source->span(), source);
  EXPECT_EQ(source.use_count(), 1);
  EXPECT_EQ(content(file->path()), source->copy());
}

TEST_P(AioEngine, EveryErrnoIsReportedAndEndsOnlyItsTransfer) {
  const auto engine = make(4, 4096, 2);
  const auto file = create("errno");
  Memory memory(64 * 4096);
  engine->write(file, 0, memory.span())->wait();
  for (const int error : {EIO, ENOSPC, ENOMEM, EINVAL, EBADF, EDQUOT, ETIMEDOUT}) {
    for (const auto direction : {IoDirection::kRead, IoDirection::kWrite}) {
      const bool reading = direction == IoDirection::kRead;
      const auto transfer = [&] {
        return reading ? engine->read(file, 0, memory.span())
                       : engine->write(file, 0, memory.span());
      };
      engine->inject_fault({direction, 5, -error, 1});
      const auto handle = transfer();
      const std::string text = error_of([&] { handle->wait(); });
      expect_in(reading ? "reading 4096 bytes at offset " : "writing 4096 bytes at offset ", text);
      expect_in("'" + file->path() + "' failed: " + std::generic_category().message(error), text);
      expect_in("(errno " + std::to_string(error) + ")", text);
      EXPECT_TRUE(handle->done());
      EXPECT_EQ(error_of([&] { handle->wait(); }), text);
      transfer()->wait();
    }
  }
}

TEST_P(AioEngine, TheFirstErrorStays) {
  const auto engine = make(4, 4096, 1);
  const auto file = create("first");
  const Memory memory(4 * 4096);
  engine->inject_fault({IoDirection::kWrite, 0, -ENOSPC, 1});
  engine->inject_fault({IoDirection::kWrite, 1, -EIO, 3});
  const auto handle = engine->write(file, 0, memory.span());
  expect_in("(errno 28)", error_of([&] { handle->wait(); }));
}

TEST_P(AioEngine, RetriesWhatPassesByItself) {
  const auto engine = make(4, 4096, 1);
  const auto file = create("retry");
  auto generator = fresh_generator();
  const Memory source(random_bytes(generator, 8 * 4096));
  for (const int error : {EINTR, EAGAIN}) {
    engine->inject_fault({IoDirection::kWrite, 2, -error, 5});
    engine->write(file, 0, source.span())->wait();
    Memory back(source.span().size());
    engine->inject_fault({IoDirection::kRead, 2, -error, 5});
    engine->read(file, 0, back.span())->wait();
    EXPECT_EQ(back.copy(), source.copy());

    engine->inject_fault({IoDirection::kWrite, 0, -error, 10});
    expect_in("10 times in succession",
              error_of([&] { engine->write(file, 0, source.span().first(4096))->wait(); }));
  }
}

TEST_P(AioEngine, ContinuesShortTransfers) {
  auto generator = fresh_generator();
  for (const bool direct : {true, false}) {
    const auto engine = make(3, 16384, 1);
    const auto file = create(direct ? "direct" : "buffered", direct);
    const Memory source(random_bytes(generator, 100'000));
    for (const std::int64_t bytes : {1, 100, 512, 4096, 5000, 8192}) {
      engine->inject_fault({IoDirection::kWrite, 1, bytes, 6});
      engine->write(file, 0, source.span())->wait();
      EXPECT_EQ(content(file->path()), source.copy());
      Memory back(source.span().size());
      engine->inject_fault({IoDirection::kRead, 1, bytes, 6});
      engine->read(file, 0, back.span())->wait();
      EXPECT_EQ(back.copy(), source.copy());
    }
  }
}

TEST_P(AioEngine, AReadPastTheEndIsAnError) {
  for (const bool direct : {true, false}) {
    const std::string path = folder_.file(direct ? "direct" : "buffered");
    fill_file(path, Bytes(50'000));
    const auto file = IoFile::open(path, IoFile::Mode::kRead, direct);
    Memory memory(4096 * 16);
    const auto engine = make();
    expect_in("the file ends (it has 50000 bytes)",
              error_of([&] { engine->read(file, 0, memory.span())->wait(); }));
    expect_in("of '" + path + "' failed: the file ends (it has 50000 bytes)",
              error_of([&] { engine->read(file, 1 << 20, memory.span())->wait(); }));
    engine->read(file, 40'960, memory.span().first(50'000 - 40'960))->wait();
  }
}

TEST_P(AioEngine, TheKernelsOwnErrorsArrive) {
  const auto engine = make();
  const auto file = create("limited");
  const Memory memory(1 << 20);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{64 * 1024, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string text = error_of([&] { engine->write(file, 0, memory.span())->wait(); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  expect_in("File too large (errno 27)", text);
  engine->write(file, 0, memory.span())->wait();
}

TEST_P(AioEngine, RefusesImpossibleTransfers) {
  const auto engine = make();
  const std::string path = folder_.file("fixed");
  fill_file(path, Bytes(100));
  const auto file = IoFile::open(path, IoFile::Mode::kRead, true);
  Memory memory(100);
  expect_in("writing '" + path + "': it was opened for reading only",
            error_of([&] { engine->write(file, 0, memory.span()); }));
  expect_in("no file reaches there", error_of([&] { engine->read(file, -1, memory.span()); }));
  expect_in("no file reaches there",
            error_of([&] { engine->read(file, INT64_MAX - 50, memory.span()); }));
  expect_in("expected a file to transfer, got none",
            error_of([&] { engine->read(nullptr, 0, memory.span()); }));
  expect_in("fault rule", error_of([&] { engine->inject_fault({IoDirection::kRead, -1, 0, 1}); }));
}

TEST_P(AioEngine, AForkedChildFailsInsteadOfWaiting) {
  auto engine = make();
  const auto file = create("forked");
  const Memory memory(1 << 20);
  const auto handle = engine->write(file, 0, memory.span());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    int failures = 0;
    for (const bool waiting : {true, false}) {
      try {
        waiting ? handle->wait() : static_cast<void>(engine->write(file, 0, memory.span()));
      } catch (const std::runtime_error&) {
        ++failures;
      }
    }
    engine.reset();
    ::_exit(failures);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "the child was stopped by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 2);
  handle->wait();
  engine->write(file, 0, memory.span())->wait();
}

TEST_P(AioEngine, RefusesOptionsOutOfRange) {
  const auto text = [&](int queue_depth, std::int64_t block_bytes, int io_threads) {
    return error_of([&] { make(queue_depth, block_bytes, io_threads); });
  };
  expect_in("queue_depth: expected 1 to 1024, got 0", text(0, 4096, 1));
  expect_in("queue_depth: expected 1 to 1024, got 1025", text(1025, 4096, 1));
  expect_in("block_bytes: expected a multiple of 4096, got 5000", text(1, 5000, 1));
  expect_in("block_bytes: expected 4096 to 1073741824, got 0", text(1, 0, 1));
  expect_in("io_threads: expected 1 to 16, got 17", text(1, 4096, 17));
  expect_in("io_threads: expected 1 to 16, got 0", text(1, 4096, 0));
}

INSTANTIATE_TEST_SUITE_P(Backends, AioEngine, ::testing::ValuesIn(testing::available_backends()),
                         [](const auto& info) { return std::string(backend_name(info.param)); });

TEST(AioBackends, AreKnownByName) {
  std::vector<std::string_view> names;
  for (const BackendReport& report : probe_backends()) {
    names.push_back(backend_name(report.backend));
    EXPECT_EQ(report.available, report.reason.empty());
    const auto made = [&] { return IoEngine::make(names.back(), {})->options().backend; };
    if (report.available) {
      EXPECT_EQ(made(), report.backend);
    } else {
      expect_in(report.reason, error_of(made));
    }
  }
  EXPECT_EQ(names, (std::vector<std::string_view>{"io_uring", "libaio", "threads"}));
  expect_in("backend: expected 'auto', 'io_uring', 'libaio' or 'threads', got 'posix'",
            error_of([] { IoEngine::make("posix", {}); }));
}

TEST(AioBackends, AutoIsTheFirstThatIsAvailable) {
  const auto available = testing::available_backends();
  EXPECT_EQ(IoEngine::make("auto", {})->options().backend, available.front());
  expect_in("io_threads: expected 1 to 16, got 0",
            error_of([] { IoEngine::make("auto", {.io_threads = 0}); }));
}

}  // namespace
}  // namespace zero_ext::core
