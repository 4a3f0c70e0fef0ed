// The two libraries that GPUDirect Storage needs, libcuda.so.1 (with FAKE_DRIVER) and
// libcufile.so.0, as far as zero_ext calls them: transfers are those of the kernel, to and from
// what the test says is behind a device address. They fail where the test says so.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

extern "C" int cuCtxGetCurrent(void** context);

#ifdef FAKE_DRIVER

namespace {
thread_local void* context_of_thread = nullptr;
}

extern "C" {

int cuCtxGetCurrent(void** context) {
  *context = context_of_thread;
  return 0;
}

int cuCtxSetCurrent(void* context) {
  context_of_thread = context;
  return 0;
}
}

#else

namespace {

enum Call { kRead, kWrite, kDriverOpen, kHandleRegister, kCalls };

struct Status {
  int err;
  int cu_err;
};

struct Description {
  int type;
  union {
    int descriptor;
    void* handle;
  };
  const void* file_system;
};

struct Fault {
  long after = 0;
  long result = 0;
  long times = 0;
};

struct State {
  std::mutex mutex;
  Fault faults[kCalls];
  long open_drivers = 0;
  std::map<int, int> files;  // by handle, a descriptor through the page cache
  long bytes[2] = {0, 0};
  void* (*behind)(const void*) = nullptr;
};

State state;
constexpr int kDriverNotInitialized = 5001;
constexpr int kPointerInvalid = 5012;
constexpr int kContextMismatch = 5015;
constexpr int kHandleNotRegistered = 5027;

// With the mutex held: whether the test has a fault for this call.
bool strikes(Call call, long& result) {
  Fault& fault = state.faults[call];
  if (fault.times == 0 || fault.after-- > 0) return false;
  fault.after = 0;
  --fault.times;
  result = fault.result;
  return true;
}

ssize_t transfer(Call call, void* handle, void* base, std::size_t bytes, off_t offset,
                 off_t base_offset) {
  std::unique_lock lock(state.mutex);
  void* context = nullptr;
  if (cuCtxGetCurrent(&context) != 0 || context == nullptr) return -kContextMismatch;
  if (state.open_drivers == 0) return -kDriverNotInitialized;
  const auto file = state.files.find(static_cast<int>(reinterpret_cast<std::intptr_t>(handle)));
  if (file == state.files.end()) return -kHandleNotRegistered;
  void* const memory = state.behind == nullptr ? base : state.behind(base);
  if (state.behind != nullptr && memory == base) return -kPointerInvalid;
  long result = 0;
  if (strikes(call, result)) {
    if (result < 0 && result > -4096) {
      errno = static_cast<int>(-result);
      return -1;
    }
    if (result <= 0) return result;
    bytes = std::min(bytes, static_cast<std::size_t>(result));
  }
  const int descriptor = file->second;
  lock.unlock();
  auto* const begin = static_cast<std::byte*>(memory) + base_offset;
  const ssize_t moved = call == kRead ? ::pread(descriptor, begin, bytes, offset)
                                      : ::pwrite(descriptor, begin, bytes, offset);
  lock.lock();
  if (moved > 0) state.bytes[call] += moved;
  return moved;
}

}  // namespace

extern "C" {

Status cuFileDriverOpen() {
  const std::lock_guard lock(state.mutex);
  long result = 0;
  if (strikes(kDriverOpen, result)) return {static_cast<int>(result), 0};
  ++state.open_drivers;
  return {0, 0};
}

Status cuFileDriverClose() {
  const std::lock_guard lock(state.mutex);
  --state.open_drivers;
  return {0, 0};
}

Status cuFileHandleRegister(void** handle, Description* description) {
  const std::lock_guard lock(state.mutex);
  long result = 0;
  if (strikes(kHandleRegister, result)) return {static_cast<int>(result), 0};
  if (description->type != 1) return {5022, 0};
  const std::string path = "/proc/self/fd/" + std::to_string(description->descriptor);
  const int number = description->descriptor + 1;
  const int again = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (again < 0) return {5018, 0};
  state.files[number] = again;
  *handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(number));
  return {0, 0};
}

void cuFileHandleDeregister(void* handle) {
  const std::lock_guard lock(state.mutex);
  const auto file = state.files.find(static_cast<int>(reinterpret_cast<std::intptr_t>(handle)));
  if (file == state.files.end()) return;
  ::close(file->second);
  state.files.erase(file);
}

ssize_t cuFileRead(void* handle, void* base, std::size_t bytes, off_t offset, off_t base_offset) {
  return transfer(kRead, handle, base, bytes, offset, base_offset);
}

ssize_t cuFileWrite(void* handle, const void* base, std::size_t bytes, off_t offset,
                    off_t base_offset) {
  return transfer(kWrite, handle, const_cast<void*>(base), bytes, offset, base_offset);
}

// The test's: what the host reaches device memory by; null where device memory is the host's.
void fake_behind(void* (*behind)(const void*)) { state.behind = behind; }

// Lets `after` calls pass, then changes `times`: `result` is an error number of the library (of
// calls with a status), else -errno, a negative number of the library below -4096, or the bytes of
// a short transfer.
void fake_fault(int call, long after, long result, long times) {
  const std::lock_guard lock(state.mutex);
  state.faults[call] = {after, result, times};
}

// Open drivers, registered files, bytes read, bytes written.
void fake_counts(long* counts) {
  const std::lock_guard lock(state.mutex);
  counts[0] = state.open_drivers;
  counts[1] = static_cast<long>(state.files.size());
  counts[2] = state.bytes[kRead];
  counts[3] = state.bytes[kWrite];
}
}

#endif
