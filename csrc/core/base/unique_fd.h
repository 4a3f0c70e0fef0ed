// A file descriptor that is closed with its object.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace zero_ext::core {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int value) : value_(value) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    reset();
    value_ = std::exchange(other.value_, -1);
    return *this;
  }

  int get() const { return value_; }
  bool valid() const { return value_ >= 0; }

 private:
  // Leaves errno alone: what it is closed for may be about to be reported.
  void reset() {
    const int error = errno;
    if (valid()) ::close(std::exchange(value_, -1));
    errno = error;
  }

  int value_ = -1;
};

}  // namespace zero_ext::core
