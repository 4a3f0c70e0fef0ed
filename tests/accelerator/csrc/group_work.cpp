#include "group_work.h"

#include <ATen/Functions.h>

#include <cstring>
#include <stdexcept>

#include "allocator.h"

namespace stand_in {

// The bytes of a contiguous tensor, which may be gone when they are used: its memory is not.
struct GroupWork::Block {
  Range range;
  std::byte* open = nullptr;      // where they are now
  std::vector<std::byte> copied;  // taken at the launch, where results overwrite them

  void take() {
    copied.assign(open, open + range.bytes);
    open = copied.data();
  }
};

struct GroupWork::Job {
  std::vector<Block> sends;
  std::vector<Block> receives;
  std::optional<Reduction> reduction;
  Block result;
  int slice;
  at::ScalarType dtype;
  std::vector<at::Tensor> arrived;  // host memory, where something is to be reduced

  std::vector<Range> results() const {
    std::vector<Range> found{result.range};
    for (const Block& receive : receives) {
      found.push_back(receive.range);
    }
    return found;
  }
};

namespace {

bool overlaps(const std::vector<Range>& ranges, const Range& range) {
  for (const Range& each : ranges) {
    if (each.bytes > 0 && range.bytes > 0 && each.overlaps(range)) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::shared_ptr<GroupWork> GroupWork::launch(const std::shared_ptr<Group>& group, Stream& stream,
                                             const std::vector<Movement>& movements,
                                             std::chrono::milliseconds limit) {
  std::vector<LaunchText> texts;
  for (const Movement& movement : movements) {
    texts.push_back(movement.text);
  }
  compare_launches(group, texts);
  const auto work = std::make_shared<GroupWork>();
  work->group_ = group;
  work->stream_ = &stream;
  work->limit_ = limit;
  Stream& calling = current_stream(stream.device());
  std::vector<Range> uses;
  const auto block = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) {
      return Block{};
    }
    DeviceMemory::get().record_use(tensor.storage().data_ptr(), stream);
    const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    uses.push_back({begin, tensor.nbytes()});
    return Block{uses.back(), open_alias(begin), {}};
  };
  for (const Movement& movement : movements) {
    Job job{{}, {}, movement.reduction, block(movement.result), movement.slice, at::kByte, {}};
    for (const at::Tensor& send : movement.sends) {
      job.sends.push_back(block(send));
      job.dtype = send.defined() ? send.scalar_type() : job.dtype;
    }
    for (const at::Tensor& receive : movement.receives) {
      job.receives.push_back(block(receive));
    }
    work->jobs_.push_back(std::move(job));
  }
  const std::uint64_t ready = calling.enqueue({[work] { work->prepare(); }, uses});
  work->ticket_ = stream.enqueue({[work, &calling, ready] {
                                    calling.await(ready);
                                    work->run();
                                  },
                                  uses, [group] { return group->segment.wanted(); }});
  return work;
}

// From here on nobody may count on what results hold.
void GroupWork::prepare() {
  std::vector<Range> results;
  for (const Job& job : jobs_) {
    const std::vector<Range> own = job.results();
    results.insert(results.end(), own.begin(), own.end());
  }
  for (Job& job : jobs_) {
    for (Block& send : job.sends) {
      if (overlaps(results, send.range)) {
        send.take();
      }
    }
  }
  for (const Range& range : results) {
    if (range.bytes > 0) {
      std::memset(open_alias(range.begin), kPoison, range.bytes);
    }
  }
}

void GroupWork::run() {
  try {
    const auto rank = static_cast<std::size_t>(group_->rank);
    std::vector<Transfer> transfers;
    for (Job& job : jobs_) {
      job.arrived.resize(job.sends.size());
      for (std::size_t peer = 0; peer < job.sends.size(); ++peer) {
        const Block& send = job.sends[peer];
        Block receive = job.receives[peer];
        if (job.reduction && job.result.range.bytes > 0) {
          const auto bytes = static_cast<std::int64_t>(job.sends[rank].range.bytes);
          job.arrived[peer] = at::empty({bytes}, at::kByte).view(job.dtype);
          receive = {{nullptr, static_cast<std::size_t>(bytes)},
                     static_cast<std::byte*>(job.arrived[peer].mutable_data_ptr()),
                     {}};
        }
        if (peer == rank) {
          std::memcpy(receive.open, send.open, std::min(send.range.bytes, receive.range.bytes));
          continue;
        }
        const auto other = static_cast<int>(peer);
        if (send.range.bytes > 0) {
          transfers.push_back({other, send.open, send.range.bytes, true});
        }
        if (receive.range.bytes > 0) {
          transfers.push_back({other, receive.open, receive.range.bytes, false});
        }
      }
    }
    group_->segment.move(transfers, limit_);
    for (const Job& job : jobs_) {
      if (job.reduction && job.result.range.bytes > 0) {
        const at::Tensor sum = job.slice < 0 ? reduce_in_ring(*job.reduction, job.arrived)
                                             : reduce_slice(*job.reduction, job.arrived, job.slice);
        std::memcpy(job.result.open, sum.const_data_ptr(), job.result.range.bytes);
      }
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    failure_ = error.what();
    throw;
  }
}

bool GroupWork::failed() const {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

void GroupWork::check() const {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    throw std::runtime_error(failure_);
  }
}

void GroupWork::block(Stream& stream) {
  if (!stream_->reached(ticket_) || failed()) {
    stream.enqueue({[work = shared_from_this()] { work->await(); }, {}});
  }
}

void GroupWork::await() {
  stream_->await(ticket_);
  check();
}

}  // namespace stand_in
