// zero_ext::pack_, accumulate_, unpack_ and sum_shards_ on CUDA devices.
#include "../../ops/flat/flat_buffer_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "flat_buffer_kernel.h"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

template <class Move>
void move_segments(const char* op, const Tensor& flat, const std::vector<Tensor>& tensors,
                   const std::vector<std::int64_t>& offsets) {
  const torch::stable::accelerator::DeviceGuard guard(flat.get_device_index());
  const core::FlatSegments segments = ops::read_flat_segments(op, flat, tensors, offsets);
  with_type(segments.flat_type, [&]<class Flat>(std::type_identity<Flat>) {
    for (const auto type :
         {core::NumericType::float32, core::NumericType::bfloat16, core::NumericType::float16}) {
      with_type(type, [&]<class Element>(std::type_identity<Element>) {
        for_each_batch<Flat, Element, Move>(
            segments, type, [op](const auto& batch) { launch_warps(op, batch, batch.tiles); });
      });
    }
  });
}

void pack(const Tensor& flat, std::vector<Tensor> tensors, std::vector<std::int64_t> offsets) {
  move_segments<PackElement>("pack_", flat, tensors, offsets);
}

void accumulate(const Tensor& flat, std::vector<Tensor> tensors,
                std::vector<std::int64_t> offsets) {
  move_segments<AccumulateElement>("accumulate_", flat, tensors, offsets);
}

void unpack(const Tensor& flat, std::vector<Tensor> tensors, std::vector<std::int64_t> offsets) {
  move_segments<UnpackElement>("unpack_", flat, tensors, offsets);
}

void sum_shards(const Tensor& out, std::vector<Tensor> shards, double scale, bool accumulate) {
  constexpr const char* op = "sum_shards_";
  constexpr std::size_t most = SumShards<float, float>::kMax;
  STD_TORCH_CHECK(shards.size() <= most, op, ": argument 'shards': expected at most ", most,
                  " tensors on a CUDA device, got ", shards.size(), ". Split the call.");
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const ops::ShardSum sum = ops::read_shard_sum(op, out, shards, scale);
  with_type(sum.target_type, [&]<class Target>(std::type_identity<Target>) {
    with_type(sum.source_type, [&]<class Source>(std::type_identity<Source>) {
      const auto kernel =
          SumShards<Target, Source>::of(sum.target, sum.sources, sum.numel, sum.scale, accumulate);
      launch_warps(op, kernel, kernel.tiles());
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("pack_", TORCH_BOX(&pack));
  library.impl("accumulate_", TORCH_BOX(&accumulate));
  library.impl("unpack_", TORCH_BOX(&unpack));
  library.impl("sum_shards_", TORCH_BOX(&sum_shards));
}

}  // namespace zero_ext::cuda
