// zero_ext::sum_shards_: the local half of a reduce-scatter by all-to-all.
#include "../../core/flat/flat_buffer.h"
#include "flat_buffer_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "sum_shards_";
constexpr std::int64_t kGrain = 32768;

void sum_shards(const Tensor& out, std::vector<Tensor> shards, double scale, bool accumulate) {
  const ShardSum sum = read_shard_sum(kOp, out, shards, scale);
  torch::stable::parallel_for(0, sum.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    core::sum_shards(sum.target, sum.target_type, sum.sources, sum.source_type, begin, end,
                     sum.scale, accumulate);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def("sum_shards_(Tensor(a!) out, Tensor[] shards, float scale, bool accumulate) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("sum_shards_", TORCH_BOX(&sum_shards));
}

}  // namespace zero_ext::ops
