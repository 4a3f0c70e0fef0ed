#include "cufile.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <unordered_map>
#include <utility>

#include "../../base/error_text.h"

namespace zero_ext::core {
namespace {

constexpr int kAlreadyOpen = 5026;  // CU_FILE_DRIVER_ALREADY_OPEN: by another part of the process

void* open_library(const std::vector<std::string>& names) {
  const std::string missing = ": cannot open shared object file: No such file or directory";
  std::string reasons;
  for (const std::string& name : names) {
    if (void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    const std::string reason = ::dlerror();
    const bool not_there = reason == name + missing;  // in short: most machines have none of them
    reasons += (reasons.empty() ? "" : "; ") + (not_there ? "no " + name : reason);
  }
  throw make_error("cuFile: ", reasons);
}

template <class Call>
void resolve(void* library, const char* name, Call& call) {
  call = reinterpret_cast<Call>(::dlsym(library, name));
  require(call != nullptr, "cuFile: no ", name, " in the library");
}

void check(const CuFileStatus& status, const std::string& action) {
  if (status.err == 0 && status.cu_err == 0) return;
  throw make_error(action, " failed: CUfileOpError ", status.err, ", CUresult ", status.cu_err);
}

// Files registered with cuFile, by each of their descriptors.
class Registrations {
 public:
  Registrations(std::shared_ptr<CuFileDriver> driver,
                const std::vector<std::shared_ptr<IoFile>>& files)
      : driver_(std::move(driver)) {
    try {
      for (const auto& file : files) add(file);
    } catch (...) {
      remove_all();
      throw;
    }
  }
  ~Registrations() { remove_all(); }
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  const CuFileCalls& calls() const { return driver_->calls(); }
  void* of(int descriptor) const { return handles_.at(descriptor); }

 private:
  void add(const std::shared_ptr<IoFile>& file) {
    CuFileDescription description;
    description.file.descriptor = file->descriptor(file->direct());
    void* handle = nullptr;
    check(calls().handle_register(&handle, &description),
          "cuFileHandleRegister of '" + file->path() + "'");
    registered_.push_back(handle);
    files_.push_back(file);
    handles_[file->descriptor(false)] = handle;
    if (file->direct()) handles_[file->descriptor(true)] = handle;
  }

  void remove_all() {
    for (void* const handle : registered_) calls().handle_deregister(handle);
  }

  const std::shared_ptr<CuFileDriver> driver_;
  std::vector<std::shared_ptr<IoFile>> files_;
  std::vector<void*> registered_;
  std::unordered_map<int, void*> handles_;
};

BlockCompletion move_block(const Registrations& files, void* context, const BlockRequest& request) {
  const CuFileCalls& calls = files.calls();
  if (const int error = calls.context_set(context); error != 0) {
    return {request.slot, 0, "cuCtxSetCurrent returned " + std::to_string(error)};
  }
  const bool reading = request.direction == IoDirection::kRead;
  const auto& memory = request.memory;
  void* const handle = files.of(request.descriptor);
  errno = 0;
  const ssize_t moved = reading
                            ? calls.read(handle, memory.data(), memory.size(), request.offset, 0)
                            : calls.write(handle, memory.data(), memory.size(), request.offset, 0);
  // -1 leaves the reason in errno, everything else below is a CUfileOpError.
  if (moved == -1) return {request.slot, -(errno != 0 ? errno : EIO), ""};
  if (moved >= 0 && static_cast<std::size_t>(moved) <= memory.size()) {
    return {request.slot, moved, ""};
  }
  return {request.slot, 0,
          std::string(reading ? "cuFileRead" : "cuFileWrite") + " returned " +
              std::to_string(moved) + (moved < 0 ? " (CUfileOpError)" : ", more than asked for")};
}

}  // namespace

CuFileCalls load_cufile(const CuFileNames& names) {
  CuFileCalls calls;
  void* const cufile = open_library(names.cufile);
  resolve(cufile, "cuFileDriverOpen", calls.driver_open);
  resolve(cufile, "cuFileDriverClose", calls.driver_close);
  resolve(cufile, "cuFileHandleRegister", calls.handle_register);
  resolve(cufile, "cuFileHandleDeregister", calls.handle_deregister);
  resolve(cufile, "cuFileRead", calls.read);
  resolve(cufile, "cuFileWrite", calls.write);
  void* const driver = open_library(names.driver);
  resolve(driver, "cuCtxGetCurrent", calls.context_get);
  resolve(driver, "cuCtxSetCurrent", calls.context_set);
  return calls;
}

CuFileDriver::CuFileDriver(const CuFileCalls& calls) : calls_(calls), process_(::getpid()) {
  const CuFileStatus status = calls_.driver_open();
  if (status.err == kAlreadyOpen) return;
  check(status, "cuFileDriverOpen");
  opened_ = true;
}

CuFileDriver::~CuFileDriver() {
  // Nothing depends on the outcome any more, and a forked child has opened nothing.
  if (opened_ && ::getpid() == process_) static_cast<void>(calls_.driver_close());
}

BlockMover cufile_mover(std::shared_ptr<CuFileDriver> driver,
                        const std::vector<std::shared_ptr<IoFile>>& files) {
  void* context = nullptr;
  const int error = driver->calls().context_get(&context);
  require(error == 0 && context != nullptr,
          "cuFile: no CUDA context is current in this thread (cuCtxGetCurrent "
          "returned ",
          error, ")");
  auto registered = std::make_shared<const Registrations>(std::move(driver), files);
  return [registered = std::move(registered), context](const BlockRequest& request) {
    return move_block(*registered, context, request);
  };
}

}  // namespace zero_ext::core
