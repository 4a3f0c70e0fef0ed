// A file descriptor that is closed with its object.
#pragma once

#include <unistd.h>

#include <utility>

namespace zero_ext::core {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset();
    value_ = std::exchange(other.value_, -1);
    return *this;
  }

  int get() const { return value_; }
  bool valid() const { return value_ >= 0; }

 private:
  void reset() {
    if (valid()) ::close(std::exchange(value_, -1));
  }

  int value_ = -1;
};

}  // namespace zero_ext::core
