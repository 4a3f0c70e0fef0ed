// zero_ext::adam_step_8bit_: one-pass Adam / AdamW with moments quantized block-wise.
#include "../core/blockwise/adam_8bit.h"

#include <optional>

#include "adam_arguments.h"
#include "checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "adam_step_8bit_";
constexpr std::int64_t kGrainBlocks = 64;

void check_moment(const Tensor& codes, const Tensor& scales, const std::string& name,
                  std::int64_t numel, std::vector<Extent>& extents) {
  const Argument codes_argument{kOp, name + "_codes"};
  const Argument scales_argument{kOp, name + "_scales"};
  check_dtype(codes, codes_argument, ScalarType::Byte);
  check_flat(codes, codes_argument, numel);
  check_dtype(scales, scales_argument, ScalarType::Float);
  check_flat(scales, scales_argument, core::block_count(numel));
  extents.push_back(extent(codes, codes_argument));
  extents.push_back(extent(scales, scales_argument));
}

core::Adam8BitBuffers read_buffers(const Tensor& master, const Tensor& exp_avg_codes,
                                   const Tensor& exp_avg_sq_codes, const Tensor& exp_avg_scales,
                                   const Tensor& exp_avg_sq_scales, const Tensor& grad,
                                   const std::optional<Tensor>& param) {
  check_dtype(master, {kOp, "master"}, ScalarType::Float);
  const std::int64_t numel = master.numel();
  check_flat(master, {kOp, "master"}, numel);
  std::vector<Extent> extents{extent(master, {kOp, "master"})};
  check_moment(exp_avg_codes, exp_avg_scales, "exp_avg", numel, extents);
  check_moment(exp_avg_sq_codes, exp_avg_sq_scales, "exp_avg_sq", numel, extents);
  const core::NumericType grad_type = check_numeric(grad, {kOp, "grad"});
  check_flat(grad, {kOp, "grad"}, numel);
  extents.push_back(extent(grad, {kOp, "grad"}));
  core::Adam8BitBuffers buffers{numel,
                                master.mutable_data_ptr<float>(),
                                exp_avg_codes.mutable_data_ptr<std::uint8_t>(),
                                exp_avg_sq_codes.mutable_data_ptr<std::uint8_t>(),
                                exp_avg_scales.mutable_data_ptr<float>(),
                                exp_avg_sq_scales.mutable_data_ptr<float>(),
                                grad.const_data_ptr(),
                                grad_type,
                                nullptr,
                                std::nullopt};
  if (param) {
    buffers.param_type = check_numeric(*param, {kOp, "param"});
    check_flat(*param, {kOp, "param"}, numel);
    buffers.param = param->mutable_data_ptr();
    extents.push_back(extent(*param, {kOp, "param"}));
  }
  check_disjoint(std::move(extents));
  return buffers;
}

void adam_step_8bit(const Tensor& master, const Tensor& exp_avg_codes,
                    const Tensor& exp_avg_sq_codes, const Tensor& exp_avg_scales,
                    const Tensor& exp_avg_sq_scales, const Tensor& grad,
                    const std::optional<Tensor>& param, const Tensor& segments, const Tensor& hyper,
                    const Tensor& grad_scale) {
  const core::Adam8BitBuffers buffers = read_buffers(
      master, exp_avg_codes, exp_avg_sq_codes, exp_avg_scales, exp_avg_sq_scales, grad, param);
  const std::vector<core::AdamSegment> parts =
      read_segments(kOp, segments, hyper, read_scale(kOp, grad_scale), buffers.count);
  torch::stable::parallel_for(0, core::block_count(buffers.count), kGrainBlocks,
                              [&](std::int64_t first, std::int64_t last) {
                                core::adam_step_8bit(buffers, parts, first, last);
                              });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "adam_step_8bit_(Tensor(a!) master, Tensor(b!) exp_avg_codes, Tensor(c!) exp_avg_sq_codes, "
      "Tensor(d!) exp_avg_scales, Tensor(e!) exp_avg_sq_scales, Tensor grad, Tensor(f!)? param, "
      "Tensor segments, Tensor hyper, Tensor grad_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("adam_step_8bit_", TORCH_BOX(&adam_step_8bit));
}

}  // namespace zero_ext::ops
