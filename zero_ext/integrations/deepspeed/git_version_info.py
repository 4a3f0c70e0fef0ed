"""``deepspeed.git_version_info``: what this DeepSpeed is and which of its operators are there."""

from __future__ import annotations

import torch

from zero_ext.integrations.deepspeed.accelerator import get_accelerator
from zero_ext.integrations.deepspeed.registry import names
from zero_ext.integrations.deepspeed.unsupported import names_of


class _Operators(dict[str, bool]):
    def __missing__(self, name: str) -> bool:
        return False


version = names().version
git_hash = git_branch = "unknown"
accelerator_name = get_accelerator().type
# By DeepSpeed's names of its builders. Nothing has to be built for them; all others are False.
installed_ops = _Operators.fromkeys(
    ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"), True
)
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}

__getattr__ = names_of("deepspeed.git_version_info")
