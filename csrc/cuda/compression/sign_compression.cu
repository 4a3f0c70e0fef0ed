// zero_ext::compress_signs_, expand_signs_, sum_signs_ and reduce_signs_ on CUDA devices.
#include "../../ops/compression/sign_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/thread_block_launch.cuh"
#include "sign_kernel.h"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

std::uint8_t* bytes_of(const ops::Payloads& payloads) {
  return reinterpret_cast<std::uint8_t*>(payloads.data);
}

void compress_signs(const Tensor& payloads, const Tensor& errors, const Tensor& values,
                    double factor, std::int64_t chunks) {
  const torch::stable::accelerator::DeviceGuard guard(payloads.get_device_index());
  const ops::SignCompression of =
      ops::read_compress_signs(payloads, errors, values, factor, chunks);
  with_type(of.type, [&]<class T>(std::type_identity<T>) {
    launch_blocks("compress_signs_",
                  CompressSigns<SignValues<T>>{{reinterpret_cast<const T*>(of.values)},
                                               of.factor,
                                               of.errors,
                                               bytes_of(of.payloads),
                                               of.chunk_numel,
                                               chunks});
  });
}

void expand_signs(const Tensor& out, const Tensor& payloads, double factor, bool accumulate,
                  std::int64_t chunks) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const ops::SignExpansion of = ops::read_expand_signs(out, payloads, factor, chunks);
  with_type(of.type, [&]<class T>(std::type_identity<T>) {
    const ExpandSigns<T> kernel{
        bytes_of(of.payloads),       of.chunk_numel, chunks, of.factor, accumulate,
        reinterpret_cast<T*>(of.out)};
    launch_warps("expand_signs_", kernel, kernel.work());
  });
}

void sum_signs(const Tensor& out, const Tensor& payloads, double factor, bool accumulate) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const ops::SignSumArguments of = ops::read_sum_signs(out, payloads, factor);
  const SumSigns kernel{
      {bytes_of(of.payloads), of.numel, of.payloads.count}, of.factor, accumulate, of.out};
  launch_warps("sum_signs_", kernel, kernel.work());
}

void reduce_signs(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                  double factor) {
  const torch::stable::accelerator::DeviceGuard guard(payload.get_device_index());
  const ops::SignReduction of = ops::read_reduce_signs(payload, error, payloads, factor);
  launch_blocks("reduce_signs_",
                CompressSigns<SignSum>{{{bytes_of(of.payloads), of.numel, of.payloads.count}},
                                       of.factor,
                                       of.error,
                                       bytes_of(of.payload),
                                       of.numel,
                                       1});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("compress_signs_", TORCH_BOX(&compress_signs));
  library.impl("expand_signs_", TORCH_BOX(&expand_signs));
  library.impl("sum_signs_", TORCH_BOX(&sum_signs));
  library.impl("reduce_signs_", TORCH_BOX(&reduce_signs));
}

}  // namespace zero_ext::cuda
