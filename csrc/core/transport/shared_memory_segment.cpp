#include "shared_memory_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>
#include <system_error>

#include "../base/error_text.h"
#include "../base/unique_fd.h"

namespace zero_ext::core {
namespace {

std::runtime_error failure(const std::string& action, const std::string& name) {
  const int reason = errno;
  return make_error(action, " shared memory '", name,
                    "': ", std::generic_category().message(reason),
                    ". Check that /dev/shm is mounted, writable and has space.");
}

std::size_t segment_bytes(int world_size) {
  const auto ranks = static_cast<std::size_t>(world_size);
  return ranks * sizeof(Member) + ranks * ranks * sizeof(Channel);
}

UniqueFd open_segment(const std::string& name, bool create) {
  UniqueFd file(::shm_open(name.c_str(), create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600));
  if (!file.valid()) throw failure("opening", name);
  return file;
}

}  // namespace

SharedMemorySegment::SharedMemorySegment(const std::string& name, int world_size, bool create)
    : world_size_(world_size), nbytes_(segment_bytes(world_size)), base_(nullptr) {
  const UniqueFd file = open_segment(name, create);
  if (create && ::posix_fallocate(file.get(), 0, static_cast<off_t>(nbytes_)) != 0) {
    throw failure("reserving", name);
  }
  struct stat status{};
  if (::fstat(file.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != nbytes_) {
    throw make_error("shared memory '", name, "': expected the size that ", world_size,
                     " ranks need, got another. Start all ranks with one version of zero_ext.");
  }
  base_ = ::mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (base_ == MAP_FAILED) throw failure("mapping", name);
}

SharedMemorySegment::~SharedMemorySegment() { ::munmap(base_, nbytes_); }

// The kernel hands out zeroed pages, and zero is the right start of every counter and descriptor.
Member& SharedMemorySegment::member(int rank) const { return static_cast<Member*>(base_)[rank]; }

Channel& SharedMemorySegment::channel(int source, int destination) const {
  auto* const channels = reinterpret_cast<Channel*>(
      static_cast<std::byte*>(base_) + static_cast<std::size_t>(world_size_) * sizeof(Member));
  return channels[source * world_size_ + destination];
}

void SharedMemorySegment::ring(int rank) const {
  auto& doorbell = member(rank).doorbell;
  doorbell.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedMemorySegment::sleep(int rank, std::uint32_t seen,
                                std::chrono::milliseconds longest) const {
  const timespec limit{longest.count() / 1000, (longest.count() % 1000) * 1'000'000};
  ::syscall(SYS_futex, &member(rank).doorbell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void SharedMemorySegment::unlink(const std::string& name) {
  if (::shm_unlink(name.c_str()) != 0 && errno != ENOENT) throw failure("removing", name);
}

}  // namespace zero_ext::core
