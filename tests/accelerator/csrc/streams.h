// Streams: queues of work, each with a worker thread that starts it late.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "memory_space.h"

namespace stand_in {

// How late work starts. kLazy: not before somebody waits for it, so that a missing wait always
// shows; kRandom: at once, a little later or not before somebody waits, drawn for each piece of
// work; kEager: at once.
enum class Schedule { kEager, kRandom, kLazy };

// Applies to all streams; each stream draws from its own generator, seeded with `seed` and its id.
void set_schedule(Schedule schedule, std::uint64_t seed);

struct Work {
  std::function<void()> run;
  std::vector<Range> uses;
  std::function<bool()> wanted = {};  // by another process, which waits for it
};

class Stream {
 public:
  Stream(int device, std::int64_t id);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int device() const { return device_; }
  std::int64_t id() const { return id_; }

  // A point in the stream's order: all work enqueued so far.
  std::uint64_t ticket() const;
  // Adds work and returns the ticket that includes it.
  std::uint64_t enqueue(Work work);
  bool reached(std::uint64_t ticket) const;
  // Like reached, and lets the work start: a loop of queries comes to an end.
  bool poll(std::uint64_t ticket);
  // The calling thread waits; never throws.
  void await(std::uint64_t ticket);
  // Waits for all work; throws what failed in it since the last drain.
  void drain();
  bool uses(const Range& range) const;
  // Whether what an op computes on this stream shall arrive late, as the schedule draws it.
  bool draw_late_result();
  void reseed();
  // Drops a failure that nobody has been told of.
  void forget_failure();

 private:
  enum class Delay { kNone, kShort, kDemand };

  void start_worker();
  void work_loop();
  Delay draw_delay();

  const int device_;
  const std::int64_t id_;
  std::deque<Work> queue_;  // the front stays there while it runs
  std::uint64_t enqueued_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t demanded_ = 0;
  bool has_worker_ = false;
  std::mt19937_64 random_;
  std::string failure_;
  std::condition_variable wake_;
};

// A record of an event: done when its stream got there.
struct Recording {
  Stream* stream = nullptr;
  std::uint64_t ticket = 0;
  std::chrono::steady_clock::time_point time;
};

std::shared_ptr<Recording> record(Stream& stream);
// Work enqueued on `stream` from now on starts after the recording.
void wait_for(Stream& stream, const std::shared_ptr<Recording>& recording);

constexpr std::int64_t kStreamsOfDevice = 33;  // the default stream and 32 handed out in turn

Stream& stream_of(int device, std::int64_t id);
// Id of the next side stream, in turn.
std::int64_t next_stream(int device);
// A stream that nobody else has, until it is given back.
Stream& take_stream(int device);
void give_stream(Stream& stream);
void drain_device(int device);
// Whether work that has not finished, on any stream of any device, reads or writes the range.
bool in_use(const Range& range);

}  // namespace stand_in
