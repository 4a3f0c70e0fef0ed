// zero_ext::compress_1bit_, decompress_1bit_, sum_1bit_ and reduce_1bit_ on CUDA devices.
#include "../../ops/compression/payload_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/thread_block_launch.cuh"
#include "sign_kernel.h"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

std::uint8_t* bytes_of(const ops::Payloads& payloads) {
  return reinterpret_cast<std::uint8_t*>(payloads.data);
}

void compress_1bit(const Tensor& payloads, const Tensor& errors, const Tensor& values,
                   double factor, std::int64_t chunks) {
  const torch::stable::accelerator::DeviceGuard guard(payloads.get_device_index());
  const ops::PayloadConversion of =
      ops::read_compress_1bit(payloads, errors, values, factor, chunks);
  with_type(of.type, [&]<class T>(std::type_identity<T>) {
    launch_blocks("compress_1bit_",
                  Compress1bit<SignValues<T>>{{reinterpret_cast<const T*>(of.values)},
                                              of.factor,
                                              of.errors,
                                              bytes_of(of.payloads),
                                              of.chunk_numel,
                                              chunks});
  });
}

void decompress_1bit(const Tensor& out, const Tensor& payloads, double factor, bool accumulate,
                     std::int64_t chunks) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const ops::PayloadConversion of = ops::read_decompress_1bit(out, payloads, factor, chunks);
  with_type(of.type, [&]<class T>(std::type_identity<T>) {
    const Decompress1bit<T> kernel{
        bytes_of(of.payloads),          of.chunk_numel, chunks, of.factor, accumulate,
        reinterpret_cast<T*>(of.values)};
    launch_warps("decompress_1bit_", kernel, kernel.work());
  });
}

void sum_1bit(const Tensor& out, const Tensor& payloads, double factor, bool accumulate) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const ops::PayloadSum of = ops::read_sum_1bit(out, payloads, factor);
  const Sum1bit kernel{
      {bytes_of(of.payloads), of.numel, of.payloads.count}, of.factor, accumulate, of.out};
  launch_warps("sum_1bit_", kernel, kernel.work());
}

void reduce_1bit(const Tensor& payload, const Tensor& error, const Tensor& payloads,
                 double factor) {
  const torch::stable::accelerator::DeviceGuard guard(payload.get_device_index());
  const ops::PayloadReduction of = ops::read_reduce_1bit(payload, error, payloads, factor);
  launch_blocks("reduce_1bit_",
                Compress1bit<SignSum>{{{bytes_of(of.in), of.chunk_numel, of.in.count}},
                                      of.factor,
                                      of.error,
                                      bytes_of(of.out),
                                      of.chunk_numel,
                                      1});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("compress_1bit_", TORCH_BOX(&compress_1bit));
  library.impl("decompress_1bit_", TORCH_BOX(&decompress_1bit));
  library.impl("sum_1bit_", TORCH_BOX(&sum_1bit));
  library.impl("reduce_1bit_", TORCH_BOX(&reduce_1bit));
}

}  // namespace zero_ext::cuda
