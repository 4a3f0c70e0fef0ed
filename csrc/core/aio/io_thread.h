// A thread that does I/O: small stack, no signals.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstddef>
#include <functional>
#include <system_error>
#include <utility>

#include "../base/error_text.h"

namespace zero_ext::core {

// Joined by join(), which must be called before destruction in the process that started it. A stack
// of the usual 8 MiB, times the threads of a pool, would count against RLIMIT_DATA; and signals are
// for the threads of the program.
class IoThread {
 public:
  // Throws std::runtime_error with the kernel's reason.
  explicit IoThread(std::function<void()> body) : body_(std::move(body)), thread_() {
    pthread_attr_t attributes;
    ::pthread_attr_init(&attributes);
    ::pthread_attr_setstacksize(&attributes, kStackBytes);
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = ::pthread_create(&thread_, &attributes, &IoThread::enter, this);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::pthread_attr_destroy(&attributes);
    if (error != 0) {
      throw make_error("I/O engine: the kernel refused a thread (",
                       std::generic_category().message(error),
                       "). Raise the limit of processes (ulimit -u).");
    }
  }
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;

  void join() { ::pthread_join(thread_, nullptr); }

 private:
  static constexpr std::size_t kStackBytes = 512 << 10;

  static void* enter(void* self) {
    static_cast<IoThread*>(self)->body_();
    return nullptr;
  }

  std::function<void()> body_;
  pthread_t thread_;
};

}  // namespace zero_ext::core
