#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "../base/error_text.h"
#include "storage_backend.h"

namespace zero_ext::core {
namespace {

class FileBackend final : public StorageBackend {
 public:
  explicit FileBackend(const std::string& path)
      : file_(IoFile::open(path, IoFile::Mode::kCreate, true)), process_(::getpid()) {}

  ~FileBackend() override {
    if (::getpid() == process_) ::unlink(file_->path().c_str());
  }
  FileBackend(const FileBackend&) = delete;
  FileBackend& operator=(const FileBackend&) = delete;

  const std::shared_ptr<IoFile>& file() const override { return file_; }
  std::int64_t base() const override { return 0; }

  void resize(std::int64_t from, std::int64_t to) override {
    const int descriptor = file_->descriptor(false);
    if (to > from) {
      const int reason = allocate(descriptor, from, to - from);
      if (reason == 0) return;
      // File systems that cannot reserve get their space from the zeros that are written next.
      if (reason != EOPNOTSUPP && reason != ENOSYS) {
        static_cast<void>(::ftruncate(descriptor, from));
        throw failure(to - from, reason);
      }
    }
    if (::ftruncate(descriptor, to) != 0) throw failure(to - from, errno);
  }

 private:
  static int allocate(int descriptor, std::int64_t offset, std::int64_t bytes) {
    while (::fallocate(descriptor, 0, offset, bytes) != 0) {
      if (errno != EINTR) return errno;
    }
    return 0;
  }

  std::runtime_error failure(std::int64_t bytes, int reason) const {
    struct statvfs system{};
    std::string free = "an unknown number of";
    if (::fstatvfs(file_->descriptor(false), &system) == 0) {
      free = std::to_string(static_cast<std::uint64_t>(system.f_bavail) * system.f_frsize);
    }
    return make_error("store: reserving ", bytes, " bytes in '", file_->path(),
                      "': ", errno_text(reason), ", and ", free,
                      " bytes are free there. Free some, pass a path with more, or offload less.");
  }

  std::shared_ptr<IoFile> file_;
  pid_t process_;
};

}  // namespace

std::unique_ptr<StorageBackend> make_file_backend(const std::string& path) {
  return std::make_unique<FileBackend>(path);
}

}  // namespace zero_ext::core
