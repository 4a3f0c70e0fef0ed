// A kernel counter that one thread waits for and others ring.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "../../base/error_text.h"
#include "../../base/unique_fd.h"

namespace zero_ext::core {

class EventFd {
 public:
  EventFd() : descriptor_(::eventfd(0, EFD_CLOEXEC)) {
    if (!descriptor_.valid()) {
      throw make_error("eventfd: ", std::generic_category().message(errno));
    }
  }

  int descriptor() const { return descriptor_.get(); }

  void signal() const {
    const std::uint64_t one = 1;
    while (::write(descriptor_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // Returns at once if it was rung since the last time.
  void wait() const {
    std::uint64_t count = 0;
    while (::read(descriptor_.get(), &count, sizeof count) < 0 && errno == EINTR) {
    }
  }

 private:
  UniqueFd descriptor_;
};

}  // namespace zero_ext::core
