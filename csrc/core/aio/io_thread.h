// A thread that does I/O: small stack, no signals.
#pragma once

#include <pthread.h>

#include <functional>

namespace zero_ext::core {

// Joined by join(), which must be called before destruction in the process that started it. A stack
// of the usual 8 MiB, times the threads of a pool, would count against RLIMIT_DATA; and signals are
// for the threads of the program.
class IoThread {
 public:
  // Throws std::runtime_error with the kernel's reason.
  explicit IoThread(std::function<void()> body);
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;

  void join();

 private:
  static void* enter(void* self);

  std::function<void()> body_;
  pthread_t thread_;
};

}  // namespace zero_ext::core
