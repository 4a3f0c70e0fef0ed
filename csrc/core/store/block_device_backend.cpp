#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "../aio/unique_fd.h"
#include "block_device_signatures.h"
#include "storage_backend.h"

namespace zero_ext::core {
namespace {

std::runtime_error failure(const std::string& path, const std::string& reason) {
  return std::runtime_error("store: block device '" + path + "': " + reason);
}

std::runtime_error kernel_failure(const std::string& path, const std::string& action) {
  const int reason = errno;
  return failure(path, action + ": " + std::generic_category().message(reason) + " (errno " +
                           std::to_string(reason) + ")");
}

// With O_EXCL the kernel lets one holder in, and none while it uses the device itself.
Descriptor claim(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) throw kernel_failure(path, "looking at it");
  if (!S_ISBLK(status.st_mode)) {
    throw failure(path, "is not a block device; give the path of one, or use files");
  }
  Descriptor claimed(::open(path.c_str(), O_RDWR | O_EXCL | O_CLOEXEC));
  if (!claimed.valid() && errno == EBUSY) {
    throw failure(path,
                  "is in use (mounted, swap, part of another device, or another job's); give one "
                  "that nothing uses");
  }
  if (!claimed.valid()) throw kernel_failure(path, "opening it");
  return claimed;
}

class DeviceBacking final : public Backing {
 public:
  explicit DeviceBacking(const std::string& path)
      : claim_(claim(path)),
        file_(File::open(path, File::Mode::kReadWrite, true)),
        room_((file_->size() - 2 * kDeviceMarginBytes) / file_->alignment() * file_->alignment()),
        process_(::getpid()) {
    check_margins(path, claim_.get(), file_->size());
    if (!write_mark(claim_.get())) throw kernel_failure(path, "marking it");
  }

  ~DeviceBacking() override {
    // A mark that cannot be taken away is recognised by the next store.
    if (::getpid() == process_) static_cast<void>(erase_mark(claim_.get()));
  }
  DeviceBacking(const DeviceBacking&) = delete;
  DeviceBacking& operator=(const DeviceBacking&) = delete;

  const std::shared_ptr<File>& file() const override { return file_; }
  std::int64_t base() const override { return kDeviceMarginBytes; }

  void resize(std::int64_t, std::int64_t to) override {
    if (to > room_) {
      throw failure(file_->path(), std::to_string(to) + " bytes wanted, it has room for " +
                                       std::to_string(room_) +
                                       "; give a larger one, or offload less");
    }
  }

 private:
  Descriptor claim_;
  std::shared_ptr<File> file_;
  std::int64_t room_;
  pid_t process_;
};

}  // namespace

std::unique_ptr<Backing> make_device_backing(const std::string& path) {
  return std::make_unique<DeviceBacking>(path);
}

}  // namespace zero_ext::core
