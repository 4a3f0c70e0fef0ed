#include "process_group.h"

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "allocator.h"

namespace stand_in {
namespace {

std::atomic<std::int64_t> formations_left{-1};

// What a process group returns.
class WorkHandle final : public c10d::Work {
 public:
  WorkHandle(std::shared_ptr<GroupWork> work, int device, bool blocks_host,
             std::vector<Movement> movements)
      : work_(std::move(work)),
        device_(device),
        blocks_host_(blocks_host),
        held_(std::move(movements)) {}

  bool isCompleted() override { return work_->poll(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    work_->check();
    work_->block(current_stream(device_));
    if (blocks_host_) {
      work_->await();
    }
    held_.clear();
    return true;
  }

 private:
  const std::shared_ptr<GroupWork> work_;
  const int device_;
  const bool blocks_host_;
  std::vector<Movement> held_;  // the tensors, as long as nobody waits
};

bool has_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return true;
    default:
      return false;
  }
}

std::string said(const char* op, const at::Tensor& tensor) {
  return c10::str(op, " of ", tensor.numel(), " x ", c10::toString(tensor.scalar_type()));
}

void check_sizes(const char* op, const at::Tensor& large, const at::Tensor& small, int size) {
  TORCH_CHECK(large.scalar_type() == small.scalar_type(), "stand_in_ccl: ", op, ": dtypes ",
              large.scalar_type(), " and ", small.scalar_type());
  TORCH_CHECK(large.numel() == small.numel() * size, "stand_in_ccl: ", op, ": ", large.numel(),
              " elements are not those of ", size, " ranks with ", small.numel());
}

// Flat parts of equal size.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int size) {
  const at::Tensor flat = tensor.detach().view(-1);
  const std::int64_t each = flat.numel() / size;
  std::vector<at::Tensor> parts;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    parts.push_back(flat.slice(0, rank * each, (rank + 1) * each));
  }
  return parts;
}

// Parts along the first dimension, equal ones where no sizes are given.
std::vector<at::Tensor> splits_of(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes,
                                  int size) {
  c10d::checkSplitSizes(sizes, tensor, size);
  return sizes.empty() ? parts_of(tensor, size) : tensor.detach().split_with_sizes(sizes);
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "stand_in_ccl: expected one tensor, got ", tensors.size());
  return tensors.front();
}

}  // namespace

void refuse_communicators(std::int64_t after) { formations_left = after; }

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                           std::chrono::milliseconds timeout)
    : Backend(rank, size), store_(std::move(store)), timeout_(timeout) {
  TORCH_CHECK(size <= kMaxRanks, "stand_in_ccl: ", size, " ranks, at most ", kMaxRanks);
}

ProcessGroup::~ProcessGroup() { abort(); }

void ProcessGroup::check(const at::Tensor& tensor, bool reduced) {
  TORCH_CHECK(tensor.device().is_privateuseone(),
              "stand_in_ccl: expected a tensor on the stand_in device, got ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "stand_in_ccl: expected a contiguous tensor, got strides ",
              tensor.strides(), " of sizes ", tensor.sizes());
  TORCH_CHECK(has_dtype(tensor.scalar_type()), "stand_in_ccl: no dtype ", tensor.scalar_type());
  TORCH_CHECK(!reduced || !at::isFloat8Type(tensor.scalar_type()), "stand_in_ccl: cannot reduce ",
              tensor.scalar_type());
  const int device = tensor.device().index();
  TORCH_CHECK(device_ < 0 || device_ == device, "stand_in_ccl: the communicator is on device ",
              device_, ", the tensor on ", device);
  device_ = device;
}

// A collective of all ranks, at the first work as NCCL's.
void ProcessGroup::form() {
  TORCH_CHECK(!ended_, "stand_in_ccl: the communicator has been shut down");
  if (group_) {
    return;
  }
  static std::atomic<int> formed{0};
  const auto key = [](int rank) { return "formed " + std::to_string(rank); };
  const auto set = [&](const std::string& name, const std::string& value) {
    store_->set(name, std::vector<std::uint8_t>(value.begin(), value.end()));
  };
  const auto get = [&](const std::string& name) {
    store_->wait({name}, timeout_);
    const auto value = store_->get(name);
    return std::string(value.begin(), value.end());
  };
  const bool refused = formations_left == 0;
  if (!refused && formations_left > 0) {
    --formations_left;
  }
  if (!refused && rank_ == 0) {
    const std::uint64_t number =
        (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
    group_ =
        std::make_shared<Group>("communicator " + std::to_string(formed++), number, 0, size_, "");
    set("segment", group_->segment.name());
    set("key", std::to_string(number));
    set("name", group_->name);
  }
  set(key(rank_), refused ? "refused" : std::to_string(getpid()));
  std::vector<std::int64_t> processes;
  for (int rank = 0; rank < size_; ++rank) {
    const std::string value = get(key(rank));
    TORCH_CHECK(value != "refused", "stand_in_ccl: rank ", rank, " could not form a communicator");
    processes.push_back(std::stoll(value));
  }
  if (rank_ != 0) {
    group_ =
        std::make_shared<Group>(get("name"), std::stoull(get("key")), rank_, size_, get("segment"));
  }
  group_->processes = std::move(processes);
  set("mapped " + std::to_string(rank_), "1");
  for (int rank = 0; rank < size_; ++rank) {
    get("mapped " + std::to_string(rank));
  }
  stream_ = &take_stream(device_);
}

void ProcessGroup::forget() {
  ended_ = true;
  if (stream_ != nullptr) {
    forget_group(*group_);
    give_stream(*stream_);
    stream_ = nullptr;
  }
}

void ProcessGroup::abort() {
  if (group_) {
    group_->segment.abort();
  }
  forget();
}

void ProcessGroup::shutdown() { forget(); }

ProcessGroup::Pointer ProcessGroup::launch(std::vector<Movement> movements, bool asynchronous) {
  form();
  if (coalescing_) {
    for (Movement& movement : movements) {
      coalesced_.push_back(std::move(movement));
    }
    return {};
  }
  ++launched_;
  const auto work = GroupWork::launch(group_, *stream_, movements, timeout_);
  if (!asynchronous) {
    work->block(current_stream(device_));
  }
  return c10::make_intrusive<WorkHandle>(work, device_, false, std::move(movements));
}

ProcessGroup::Pointer ProcessGroup::endCoalescing() {
  coalescing_ = false;
  return coalesced_.empty() ? Pointer() : launch(std::exchange(coalesced_, {}), true);
}

Movement ProcessGroup::nothing(const std::string& text) const {
  const Tensors none(static_cast<std::size_t>(size_));
  return {{text, -1, -1, {}, {}}, none, none};
}

Movement ProcessGroup::all_reduce_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check(tensor, true);
  const Reduction reduction = reduction_of(op, tensor.scalar_type(), size_);
  Movement movement = nothing(said("all_reduce", tensor) + ", " + reduction.text());
  movement.sends.assign(movement.sends.size(), tensor);
  movement.reduction = reduction;
  movement.result = tensor;
  return movement;
}

Movement ProcessGroup::all_gather_of(const at::Tensor& output, const at::Tensor& input) {
  check(output);
  check(input);
  check_sizes("all_gather", output, input, size_);
  Movement movement = nothing(said("all_gather", input));
  movement.sends.assign(movement.sends.size(), input);
  movement.receives = parts_of(output, size_);
  return movement;
}

Movement ProcessGroup::reduce_scatter_of(const at::Tensor& output, const at::Tensor& input,
                                         const c10d::ReduceOp& op) {
  check(output, true);
  check(input, true);
  check_sizes("reduce_scatter", input, output, size_);
  const Reduction reduction = reduction_of(op, input.scalar_type(), size_);
  Movement movement = nothing(said("reduce_scatter", output) + ", " + reduction.text());
  movement.sends = parts_of(input, size_);
  movement.reduction = reduction;
  movement.result = output;
  movement.slice = rank_;
  return movement;
}

Movement ProcessGroup::all_to_all_of(const Tensors& outputs, const Tensors& inputs) {
  const auto ranks = static_cast<std::size_t>(size_);
  TORCH_CHECK(outputs.size() == ranks && inputs.size() == ranks,
              "stand_in_ccl: all_to_all: ", inputs.size(), " inputs and ", outputs.size(),
              " outputs for ", size_, " ranks");
  const at::ScalarType dtype = inputs.front().scalar_type();
  Movement movement = nothing(c10::str("all_to_all of ", c10::toString(dtype)));
  movement.sends = inputs;
  movement.receives = outputs;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (const at::Tensor* tensor : {&inputs[rank], &outputs[rank]}) {
      check(*tensor);
      TORCH_CHECK(tensor->scalar_type() == dtype, "stand_in_ccl: all_to_all: dtypes ", dtype,
                  " and ", tensor->scalar_type());
    }
    movement.text.sends.push_back(inputs[rank].nbytes());
    movement.text.receives.push_back(outputs[rank].nbytes());
  }
  TORCH_CHECK(inputs[static_cast<std::size_t>(rank_)].nbytes() ==
                  outputs[static_cast<std::size_t>(rank_)].nbytes(),
              "stand_in_ccl: all_to_all: a rank's part for itself has two sizes");
  return movement;
}

ProcessGroup::Pointer ProcessGroup::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors);
  check(tensor);
  const auto root = static_cast<int>(options.rootRank);
  Movement movement = nothing(said("broadcast", tensor) + c10::str(" from ", root));
  if (rank_ == root) {
    movement.sends.assign(movement.sends.size(), tensor);
  }
  movement.receives[static_cast<std::size_t>(root)] = tensor;
  return launch({movement}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  return launch({all_reduce_of(only(tensors), options.reduceOp)}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Movement> movements;
  for (const at::Tensor& tensor : tensors) {
    movements.push_back(all_reduce_of(tensor, options.reduceOp));
  }
  return launch(movements, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  const at::Tensor& tensor = only(tensors);
  Movement movement = all_reduce_of(tensor, options.reduceOp);
  movement.text.text += c10::str(" to ", root);
  movement.sends.assign(movement.sends.size(), at::Tensor());
  movement.sends[static_cast<std::size_t>(root)] = tensor;
  if (rank_ != root) {
    movement.result.reset();
  }
  return launch({movement}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == 1, "stand_in_ccl: expected one list of tensors");
  const at::Tensor& input = only(inputs);
  check(input);
  Movement movement = nothing(said("all_gather", input));
  for (const at::Tensor& output : outputs.front()) {
    check(output);
    check_sizes("all_gather", output, input, 1);
  }
  movement.sends.assign(movement.sends.size(), input);
  movement.receives = outputs.front();
  return launch({movement}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  return launch({all_gather_of(output, input)}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  std::vector<Movement> movements;
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    movements.push_back(all_gather_of(outputs.at(index), inputs[index]));
  }
  return launch(movements, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs);
  check(input);
  const auto root = static_cast<int>(options.rootRank);
  Movement movement = nothing(said("gather", input) + c10::str(" to ", root));
  movement.sends[static_cast<std::size_t>(root)] = input;
  if (rank_ == root) {
    TORCH_CHECK(outputs.size() == 1, "stand_in_ccl: gather: expected one list of outputs");
    for (const at::Tensor& output : outputs.front()) {
      check(output);
      check_sizes("gather", output, input, 1);
    }
    movement.receives = outputs.front();
  }
  return launch({movement}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs);
  check(output);
  const auto root = static_cast<int>(options.rootRank);
  Movement movement = nothing(said("scatter", output) + c10::str(" from ", root));
  movement.receives[static_cast<std::size_t>(root)] = output;
  if (rank_ == root) {
    TORCH_CHECK(inputs.size() == 1, "stand_in_ccl: scatter: expected one list of inputs");
    for (const at::Tensor& input : inputs.front()) {
      check(input);
      check_sizes("scatter", input, output, 1);
    }
    movement.sends = inputs.front();
  }
  return launch({movement}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs);
  TORCH_CHECK(inputs.size() == 1, "stand_in_ccl: reduce_scatter: expected one list of inputs");
  check(output, true);
  const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type(), size_);
  Movement movement = nothing(said("reduce_scatter", output) + ", " + reduction.text());
  for (const at::Tensor& input : inputs.front()) {
    check(input, true);
    check_sizes("reduce_scatter", input, output, 1);
  }
  movement.sends = inputs.front();
  movement.reduction = reduction;
  movement.result = output;
  movement.slice = rank_;
  return launch({movement}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return launch({reduce_scatter_of(output, input, options.reduceOp)}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  std::vector<Movement> movements;
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    movements.push_back(reduce_scatter_of(outputs.at(index), inputs[index], options.reduceOp));
  }
  return launch(movements, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<std::int64_t>& output_splits,
                                                  std::vector<std::int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  check(output);
  check(input);
  return launch({all_to_all_of(splits_of(output, output_splits, size_),
                               splits_of(input, input_splits, size_))},
                options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& options) {
  return launch({all_to_all_of(outputs, inputs)}, options.asyncOp);
}

ProcessGroup::Pointer ProcessGroup::send(Tensors& tensors, int receiver, int /*tag*/) {
  const at::Tensor& tensor = only(tensors);
  check(tensor);
  TORCH_CHECK(receiver != rank_ && receiver >= 0 && receiver < size_, "stand_in_ccl: send to rank ",
              receiver);
  Movement movement = nothing(said("send", tensor) + c10::str(" from ", rank_, " to ", receiver));
  movement.text.sender = rank_;
  movement.text.receiver = receiver;
  movement.sends[static_cast<std::size_t>(receiver)] = tensor;
  return launch({movement}, true);
}

ProcessGroup::Pointer ProcessGroup::recv(Tensors& tensors, int sender, int /*tag*/) {
  const at::Tensor& tensor = only(tensors);
  check(tensor);
  TORCH_CHECK(sender != rank_ && sender >= 0 && sender < size_, "stand_in_ccl: receive from rank ",
              sender);
  Movement movement = nothing(said("receive", tensor) + c10::str(" from ", sender, " to ", rank_));
  movement.text.sender = sender;
  movement.text.receiver = rank_;
  movement.receives[static_cast<std::size_t>(sender)] = tensor;
  return launch({movement}, true);
}

ProcessGroup::Pointer ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  const int index = options.device && options.device->has_index() ? options.device->index()
                    : device_ >= 0                                ? device_
                                                                  : current_device();
  const c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
  const at::Tensor token = at::zeros({1}, at::dtype(at::kFloat).device(device));
  Movement movement = all_reduce_of(token, c10d::ReduceOp::SUM);
  movement.text.text = "barrier";
  form();
  ++launched_;
  const auto work = GroupWork::launch(group_, *stream_, {movement}, timeout_);
  return c10::make_intrusive<WorkHandle>(work, device_, true, std::vector{movement});
}

}  // namespace stand_in
