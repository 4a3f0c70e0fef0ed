// Transfers by cuFile, whose functions the test puts in its place: memory is the host's, and every
// status and result is the test's choice.
#include "../../core/aio/queues/cufile.h"

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include "../../core/store/striped_store.h"
#include "../test_support.h"
#include "aio_support.h"

namespace zero_ext::core {
namespace {

using testing::Bytes;
using testing::error_of;
using testing::expect_in;
using testing::fresh_generator;
using testing::Memory;
using testing::random_bytes;
using testing::ScratchFolder;

constexpr std::int64_t kBlock = 4096;

// What the functions below do and have seen; functions of a C library have no object of their own.
struct Library {
  std::mutex mutex;
  int open_drivers = 0;
  std::map<void*, int> descriptors;
  CuFileStatus open_status;
  CuFileStatus register_status;
  std::ptrdiff_t refused_file = -1;   // the number of the registration that fails
  std::vector<std::int64_t> results;  // of the next transfers, one each: below 0, or bytes at most
  int reason = 0;                     // errno of those
  void* context = nullptr;            // of the thread that opens
  std::atomic<int> strangers = 0;     // transfers on threads without the context
};

std::unique_ptr<Library> library;
thread_local void* context_of_thread = nullptr;
int the_context;

template <bool kReading>
ssize_t transfer(void* handle, std::byte* memory, std::size_t bytes, off_t offset) {
  if (context_of_thread != &the_context) ++library->strangers;
  std::unique_lock lock(library->mutex);
  const int descriptor = library->descriptors.at(handle);
  if (!library->results.empty()) {
    const std::int64_t result = library->results.front();
    library->results.erase(library->results.begin());
    if (result <= 0 || result > kBlock) {
      errno = library->reason;
      return result;
    }
    bytes = std::min(bytes, static_cast<std::size_t>(result));
  }
  lock.unlock();
  return kReading ? ::pread(descriptor, memory, bytes, offset)
                  : ::pwrite(descriptor, memory, bytes, offset);
}

CuFileCalls fake_calls() {
  CuFileCalls calls;
  calls.driver_open = [] {
    if (library->open_status.err == 0) ++library->open_drivers;
    return library->open_status;
  };
  calls.driver_close = [] {
    --library->open_drivers;
    return CuFileStatus{};
  };
  calls.handle_register = [](void** handle, CuFileDescription* description) {
    if (static_cast<std::ptrdiff_t>(library->descriptors.size()) == library->refused_file) {
      return library->register_status;
    }
    EXPECT_EQ(description->type, 1);
    // Not past the page cache: what is left of a short transfer is not aligned.
    const std::string path = "/proc/self/fd/" + std::to_string(description->file.descriptor);
    const int descriptor = ::open(path.c_str(), O_RDWR);
    *handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
    library->descriptors[*handle] = descriptor;
    return CuFileStatus{};
  };
  calls.handle_deregister = [](void* handle) {
    ::close(library->descriptors.at(handle));
    library->descriptors.erase(handle);
  };
  calls.read = [](void* handle, void* memory, std::size_t bytes, off_t offset, off_t from) {
    return transfer<true>(handle, static_cast<std::byte*>(memory) + from, bytes, offset);
  };
  calls.write = [](void* handle, const void* memory, std::size_t bytes, off_t offset, off_t from) {
    auto* const bytes_of = static_cast<std::byte*>(const_cast<void*>(memory));
    return transfer<false>(handle, bytes_of + from, bytes, offset);
  };
  calls.context_get = [](void** context) {
    *context = library->context;
    return 0;
  };
  calls.context_set = [](void* context) {
    context_of_thread = context;
    return 0;
  };
  return calls;
}

constexpr std::int64_t kBytes = 40 * kBlock;

class CuFile : public ::testing::Test {
 protected:
  CuFile() {
    library = std::make_unique<Library>();
    library->context = &the_context;
  }

  // Two files with stripes of two pages, transfers in blocks of one.
  std::unique_ptr<StripedStore> make_store(bool checksum = false) const {
    const IoEngineOptions options{Backend::kThreads, 4, kBlock, 2};
    const StripedStoreOptions store_options{.stripe_bytes = 8192, .checksum = checksum};
    auto store = std::make_unique<StripedStore>(
        IoEngine::make(options), std::vector{folder_.file("a"), folder_.file("b")}, store_options);
    store->reserve(kBytes);
    EXPECT_EQ(store->allocate(kBytes), 0);
    return store;
  }

  static std::shared_ptr<CuFileDriver> driver() {
    return std::make_shared<CuFileDriver>(fake_calls());
  }

  std::string error_of_read(StripedStore& store) {
    const auto handle = store.read(0, capacity_.span(), nullptr, MemoryKind::kDevice);
    return error_of([&] { handle->wait(); });
  }

  const ScratchFolder folder_;
  Memory capacity_{kBytes};
};

TEST_F(CuFile, BytesMoveInBothDirectionsOnThreadsWithTheContext) {
  auto generator = fresh_generator();
  const auto store = make_store();
  store->open_direct(driver());
  const Memory values(random_bytes(generator, kBytes));
  store->write(0, values.span(), nullptr, MemoryKind::kDevice)->wait();
  store->read(0, capacity_.span(), nullptr)->wait();
  EXPECT_EQ(capacity_.copy(), values.copy());
  const Memory others(random_bytes(generator, kBytes));
  store->write(0, others.span(), nullptr)->wait();
  store->read(0, capacity_.span(), nullptr, MemoryKind::kDevice)->wait();
  EXPECT_EQ(capacity_.copy(), others.copy());
  EXPECT_EQ(library->strangers, 0);
  EXPECT_EQ(store->stats().bytes_read, 2 * kBytes);
}

TEST_F(CuFile, ShortTransfersGoOnAndInterruptionsPass) {
  auto generator = fresh_generator();
  const auto store = make_store();
  store->open_direct(driver());
  const Memory values(random_bytes(generator, kBytes));
  library->results = {1000, 1, 4095, -1, 700, -1};
  library->reason = EINTR;
  store->write(0, values.span(), nullptr, MemoryKind::kDevice)->wait();
  library->results = {3, -1, 4000, 96, 1};
  store->read(0, capacity_.span(), nullptr, MemoryKind::kDevice)->wait();
  EXPECT_TRUE(library->results.empty());
  EXPECT_EQ(capacity_.copy(), values.copy());
}

TEST_F(CuFile, EveryFailureNamesPathOffsetLengthAndReason) {
  const auto store = make_store();
  store->open_direct(driver());
  const std::vector<std::pair<std::int64_t, std::string>> cases = {
      {-1, "(errno 5)"},
      {-5011, "cuFileRead returned -5011 (CUfileOpError)"},
      {4097, "cuFileRead returned 4097, more than asked for"},
      {0, "the file ends"},
  };
  library->reason = EIO;
  for (const auto& [result, reason] : cases) {
    library->results = {result};
    const std::string text = error_of_read(*store);
    expect_in("reading 4096 bytes at offset ", text);
    expect_in(folder_.file(""), text);
    expect_in(reason, text);
  }
  library->reason = 0;  // a failure that says nothing is one all the same
  library->results = {-1};
  expect_in("(errno 5)", error_of_read(*store));
  library->results = {-5012};
  const auto handle = store->write(0, capacity_.span(), nullptr, MemoryKind::kDevice);
  expect_in("cuFileWrite returned -5012", error_of([&] { handle->wait(); }));
  store->read(0, capacity_.span(), nullptr, MemoryKind::kDevice)->wait();
}

TEST_F(CuFile, AStoreThatCannotOpenItIsAsBefore) {
  const auto store = make_store();
  const auto opening = [&] { store->open_direct(driver()); };
  library->open_status = {5001, 0};
  expect_in("cuFileDriverOpen failed: CUfileOpError 5001, CUresult 0", error_of(opening));
  library->open_status = {0, 3};
  expect_in("CUfileOpError 0, CUresult 3", error_of(opening));
  library->open_status = {};
  library->open_drivers = 0;
  library->refused_file = 1;
  library->register_status = {5008, 0};
  const std::string text = error_of(opening);
  expect_in("cuFileHandleRegister of '" + folder_.file("b") + "' failed: CUfileOpError 5008", text);
  library->refused_file = -1;
  library->context = nullptr;
  expect_in("no CUDA context", error_of(opening));
  EXPECT_TRUE(library->descriptors.empty());
  EXPECT_EQ(library->open_drivers, 0);
  expect_in("expected host memory, got device memory",
            error_of([&] { store->read(0, capacity_.span(), nullptr, MemoryKind::kDevice); }));
  store->read(0, capacity_.span(), nullptr)->wait();
}

TEST_F(CuFile, ChecksumsAreTheHosts) {
  const auto store = make_store(true);
  expect_in("offload.checksum", error_of([&] { store->open_direct(driver()); }));
  EXPECT_EQ(library->open_drivers, 0);
}

TEST_F(CuFile, EverythingIsReleased) {
  {
    const auto shared = driver();
    auto one = make_store();
    one->open_direct(shared);
    EXPECT_EQ(library->descriptors.size(), 2U);
    one->close_direct();
    EXPECT_TRUE(library->descriptors.empty());
    one->close_direct();
    one->open_direct(shared);
  }
  EXPECT_TRUE(library->descriptors.empty());
  EXPECT_EQ(library->open_drivers, 0);
}

TEST_F(CuFile, ADriverThatIsOpenAlreadyStaysOpen) {
  library->open_status = {5026, 0};
  library->open_drivers = 1;
  driver();
  EXPECT_EQ(library->open_drivers, 1);
}

TEST(CuFileLibrary, WhatIsMissingIsNamed) {
  CuFileNames names{{"libno-such-cufile.so.0", "/no/such/libcufile.so"}, {"libno-such-driver.so"}};
  const std::string text = error_of([&] { load_cufile(names); });
  EXPECT_EQ(text, "cuFile: no libno-such-cufile.so.0; no /no/such/libcufile.so");
  names.cufile = {"libm.so.6"};
  expect_in("no cuFileDriverOpen", error_of([&] { load_cufile(names); }));
}

}  // namespace
}  // namespace zero_ext::core
