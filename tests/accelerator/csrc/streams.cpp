#include "streams.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <utility>

namespace stand_in {
namespace {

// How long another process may wait until it is seen to.
constexpr std::chrono::milliseconds kGlance{1};

// One lock for all queues: what runs is long compared with what the lock guards.
struct Runtime {
  std::mutex mutex;
  std::condition_variable progress;
  Schedule schedule = Schedule::kRandom;
  std::uint64_t seed = 0;
  std::array<std::vector<std::unique_ptr<Stream>>, kDeviceCount> streams;
  std::array<std::vector<Stream*>, kDeviceCount> given_back;
  std::array<std::atomic<std::int64_t>, kDeviceCount> handed_out{};

  Runtime() {
    for (int device = 0; device < kDeviceCount; ++device) {
      for (std::int64_t id = 0; id < kStreamsOfDevice; ++id) {
        streams[static_cast<std::size_t>(device)].push_back(std::make_unique<Stream>(device, id));
      }
    }
  }
};

Runtime& runtime() {
  // Never destroyed: its threads run, and tensors may be freed, until the process ends.
  static Runtime* const leaked = std::make_unique<Runtime>().release();
  return *leaked;
}

}  // namespace

void set_schedule(Schedule schedule, std::uint64_t seed) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  all.schedule = schedule;
  all.seed = seed;
  for (auto& streams : all.streams) {
    for (auto& stream : streams) {
      stream->reseed();
    }
  }
}

Stream::Stream(int device, std::int64_t id) : device_(device), id_(id) { random_.seed(id_ + 1); }

void Stream::reseed() {
  std::seed_seq seeds{runtime().seed, static_cast<std::uint64_t>(device_),
                      static_cast<std::uint64_t>(id_)};
  random_.seed(seeds);
}

std::uint64_t Stream::ticket() const {
  const std::lock_guard lock(runtime().mutex);
  return enqueued_;
}

std::uint64_t Stream::enqueue(Work work) {
  const std::lock_guard lock(runtime().mutex);
  if (!has_worker_) {
    start_worker();
  }
  queue_.push_back(std::move(work));
  ++enqueued_;
  wake_.notify_one();
  return enqueued_;
}

bool Stream::reached(std::uint64_t ticket) const {
  const std::lock_guard lock(runtime().mutex);
  return completed_ >= ticket;
}

bool Stream::poll(std::uint64_t ticket) {
  const std::lock_guard lock(runtime().mutex);
  demanded_ = std::max(demanded_, ticket);
  wake_.notify_one();
  return completed_ >= ticket;
}

void Stream::await(std::uint64_t ticket) {
  Runtime& all = runtime();
  std::unique_lock lock(all.mutex);
  demanded_ = std::max(demanded_, ticket);
  wake_.notify_one();
  all.progress.wait(lock, [&] { return completed_ >= ticket; });
}

void Stream::drain() {
  await(ticket());
  const std::lock_guard lock(runtime().mutex);
  if (!failure_.empty()) {
    throw std::runtime_error("stand_in: work on stream " + std::to_string(id_) +
                             " failed: " + std::exchange(failure_, {}));
  }
}

bool Stream::uses(const Range& range) const {
  for (const Work& work : queue_) {
    for (const Range& used : work.uses) {
      if (used.overlaps(range)) {
        return true;
      }
    }
  }
  return false;
}

void Stream::forget_failure() {
  const std::lock_guard lock(runtime().mutex);
  failure_.clear();
}

bool Stream::draw_late_result() {
  const Runtime& all = runtime();
  const std::lock_guard lock(runtime().mutex);
  return all.schedule == Schedule::kLazy ||
         (all.schedule == Schedule::kRandom && random_() % 4 == 0);
}

void Stream::start_worker() {
  has_worker_ = true;
  std::thread([this] { work_loop(); }).detach();
}

Stream::Delay Stream::draw_delay() {
  switch (runtime().schedule) {
    case Schedule::kEager:
      return Delay::kNone;
    case Schedule::kLazy:
      return Delay::kDemand;
    case Schedule::kRandom:
      break;
  }
  return static_cast<Delay>(random_() % 3);
}

void Stream::work_loop() {
  Runtime& all = runtime();
  std::unique_lock lock(all.mutex);
  while (true) {
    wake_.wait(lock, [&] { return !queue_.empty(); });
    const auto demanded = [&] { return demanded_ > completed_; };
    const Delay delay = draw_delay();
    if (delay == Delay::kDemand) {
      const auto& wanted = queue_.front().wanted;
      while (wanted && !demanded() && !wanted()) {
        wake_.wait_for(lock, kGlance);
      }
      wake_.wait(lock, [&] { return demanded() || wanted; });
    } else if (delay == Delay::kShort) {
      wake_.wait_for(lock, std::chrono::microseconds(random_() % 2000), demanded);
    }
    const Work& work = queue_.front();  // only this thread takes it away
    lock.unlock();
    std::string failure;
    try {
      work.run();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    if (failure_.empty()) {
      failure_ = failure;
    }
    queue_.pop_front();
    ++completed_;
    all.progress.notify_all();
  }
}

std::shared_ptr<Recording> record(Stream& stream) {
  auto recording = std::make_shared<Recording>();
  recording->stream = &stream;
  recording->ticket = stream.ticket();
  recording->time = std::chrono::steady_clock::now();
  if (!stream.reached(recording->ticket)) {
    recording->ticket =
        stream.enqueue({[recording] { recording->time = std::chrono::steady_clock::now(); }, {}});
  }
  return recording;
}

void wait_for(Stream& stream, const std::shared_ptr<Recording>& recording) {
  if (recording->stream != &stream && !recording->stream->reached(recording->ticket)) {
    stream.enqueue({[recording] { recording->stream->await(recording->ticket); }, {}});
  }
}

Stream& stream_of(int device, std::int64_t id) {
  return *runtime().streams.at(static_cast<std::size_t>(device)).at(static_cast<std::size_t>(id));
}

std::int64_t next_stream(int device) {
  auto& count = runtime().handed_out.at(static_cast<std::size_t>(device));
  return 1 + count.fetch_add(1) % (kStreamsOfDevice - 1);
}

Stream& take_stream(int device) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  auto& free = all.given_back.at(static_cast<std::size_t>(device));
  if (!free.empty()) {
    Stream* const stream = free.back();
    free.pop_back();
    return *stream;
  }
  auto& streams = all.streams.at(static_cast<std::size_t>(device));
  streams.push_back(std::make_unique<Stream>(device, static_cast<std::int64_t>(streams.size())));
  streams.back()->reseed();
  return *streams.back();
}

void give_stream(Stream& stream) {
  stream.await(stream.ticket());
  stream.forget_failure();
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  all.given_back.at(static_cast<std::size_t>(stream.device())).push_back(&stream);
}

void drain_device(int device) {
  Runtime& all = runtime();
  std::vector<Stream*> streams;
  {
    const std::lock_guard lock(all.mutex);
    for (auto& stream : all.streams.at(static_cast<std::size_t>(device))) {
      streams.push_back(stream.get());
    }
  }
  for (Stream* const stream : streams) {
    stream->drain();
  }
}

bool in_use(const Range& range) {
  Runtime& all = runtime();
  const std::lock_guard lock(all.mutex);
  for (const auto& streams : all.streams) {
    for (const auto& stream : streams) {
      if (stream->uses(range)) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace stand_in
