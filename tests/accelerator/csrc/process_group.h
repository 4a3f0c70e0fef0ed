// The collectives of the stand-in, as strict as NCCL's.
#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "group_work.h"

namespace stand_in {

// Serves contiguous tensors of one device of the stand-in. Its works run on a stream of their own,
// in the order in which they are launched; waiting for one makes the current stream wait.
class ProcessGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;

  ProcessGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
               std::chrono::milliseconds timeout);
  ~ProcessGroup() override;

  const std::string getBackendName() const override { return "stand_in_ccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return launched_; }
  void startCoalescing() override { coalescing_ = true; }
  Pointer endCoalescing() override;
  void abort() override;
  void shutdown() override;

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Pointer allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Pointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  Pointer _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  Pointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  Pointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  Pointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  Pointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Pointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  Pointer alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  Pointer alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  Pointer send(Tensors& tensors, int receiver, int tag) override;
  Pointer recv(Tensors& tensors, int sender, int tag) override;
  Pointer barrier(const c10d::BarrierOptions& options) override;

 private:
  Movement all_reduce_of(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Movement all_gather_of(const at::Tensor& output, const at::Tensor& input);
  Movement reduce_scatter_of(const at::Tensor& output, const at::Tensor& input,
                             const c10d::ReduceOp& op);
  Movement all_to_all_of(const Tensors& outputs, const Tensors& inputs);
  Movement nothing(const std::string& text) const;

  void check(const at::Tensor& tensor, bool reduced = false);
  void form();
  void forget();
  Pointer launch(std::vector<Movement> movements, bool asynchronous);

  const c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Group> group_;
  Stream* stream_ = nullptr;
  bool ended_ = false;
  int device_ = -1;
  bool coalescing_ = false;
  std::vector<Movement> coalesced_;
  std::uint64_t launched_ = 0;
};

// The next `after` communicators form, and those after them do not, until called with -1.
void refuse_communicators(std::int64_t after);

}  // namespace stand_in
