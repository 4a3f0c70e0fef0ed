#include "io_thread.h"

#include <signal.h>

#include <stdexcept>
#include <system_error>
#include <utility>

namespace zero_ext::core {
namespace {

constexpr std::size_t kStackBytes = 512 << 10;

}  // namespace

IoThread::IoThread(std::function<void()> body) : body_(std::move(body)), thread_() {
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
    throw std::runtime_error("I/O engine: the kernel refused a thread (" +
                             std::generic_category().message(error) +
                             "). Raise the limit of processes (ulimit -u).");
  }
}

void IoThread::join() { ::pthread_join(thread_, nullptr); }

void* IoThread::enter(void* self) {
  static_cast<IoThread*>(self)->body_();
  return nullptr;
}

}  // namespace zero_ext::core
