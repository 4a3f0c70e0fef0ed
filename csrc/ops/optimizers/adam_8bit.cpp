// zero_ext::adam_step_8bit_: one-pass Adam / AdamW with moments quantized block-wise.
#include "../../core/optimizers/optimizer_step.h"
#include "../op_registration.h"
#include "optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "adam_step_8bit_";
constexpr std::int64_t kGrainBlocks = 64;

void adam_step_8bit(const Tensor& master, const Tensor& exp_avg_codes,
                    const Tensor& exp_avg_sq_codes, const Tensor& exp_avg_scales,
                    const Tensor& exp_avg_sq_scales, const Tensor& grad,
                    const OptionalTensor& param, const Tensor& segments, const Tensor& hyper,
                    const Tensor& grad_scale, const OptionalTensor& non_finite) {
  const core::Adam8BitBuffers buffers =
      read_adam_8bit_buffers(kOp, master, {exp_avg_codes, exp_avg_scales},
                             {exp_avg_sq_codes, exp_avg_sq_scales}, grad, param, non_finite);
  const auto prepared = read_segments<core::AdamRule>(kOp, segments, hyper,
                                                      read_scale(kOp, grad_scale), buffers.count);
  torch::stable::parallel_for(0, core::block_count(buffers.count), kGrainBlocks,
                              [&](std::int64_t first, std::int64_t last) {
                                core::adam_step_8bit(buffers, prepared, first, last);
                              });
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("adam_step_8bit_(Tensor(a!) master, Tensor(b!) exp_avg_codes, Tensor(c!) exp_avg_sq_codes, "
      "Tensor(d!) exp_avg_scales, Tensor(e!) exp_avg_sq_scales, Tensor grad, Tensor(f!)? param, "
      "Tensor segments, Tensor hyper, Tensor grad_scale, Tensor(g!)? non_finite=None) -> ()",
      TORCH_BOX(&adam_step_8bit));
}

}  // namespace zero_ext::ops
