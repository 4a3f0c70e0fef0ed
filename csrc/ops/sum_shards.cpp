// zero_ext::sum_shards_: the local half of a reduce-scatter by all-to-all.
#include <algorithm>
#include <cmath>

#include "../core/flat.h"
#include "checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "sum_shards_";
constexpr std::int64_t kGrain = 32768;

void sum_shards(const Tensor& out, std::vector<Tensor> shards, double scale, bool accumulate) {
  const core::NumericType out_type = check_numeric(out, {kOp, "out"});
  const std::int64_t numel = out.numel();
  check_flat(out, {kOp, "out"}, numel);
  STD_TORCH_CHECK(!shards.empty(), kOp, ": argument 'shards' is empty; give at least one tensor");
  STD_TORCH_CHECK(std::isfinite(scale), kOp, ": scale is ", scale, "; it must be finite");
  const core::NumericType shard_type = check_numeric(shards[0], {kOp, "shards[0]"});
  std::vector<const void*> sources;
  sources.reserve(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Argument argument{kOp, "shards[" + std::to_string(i) + "]"};
    check_dtype(shards[i], argument, shards[0].scalar_type());
    check_flat(shards[i], argument, numel);
    sources.push_back(shards[i].const_data_ptr());
    const bool in_place = sources.back() == out.const_data_ptr() && shard_type == out_type;
    if (!in_place) check_disjoint({extent(out, {kOp, "out"}), extent(shards[i], argument)});
  }
  void* const target = out.mutable_data_ptr();
  torch::stable::parallel_for(0, numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    core::sum_shards(target, out_type, sources, shard_type, begin, end, static_cast<float>(scale),
                     accumulate);
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
