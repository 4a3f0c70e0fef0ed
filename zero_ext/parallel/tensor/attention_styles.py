"""Tensor-parallel styles of attention: heads per rank, keys that all heads share, latent keys."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from zero_ext.parallel.tensor.auto_tp_plan import HEADS
from zero_ext.parallel.tensor.tp_styles import sum_gradients

# Numbers of heads of keys and values. Multi-query attention has one, on every rank.
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


class LocalHeads(ParallelStyle):
    """Makes an attention module count this rank's heads alone.

    ALiBi's biases [samples × heads, 1, keys], an argument ``alibi``, and masks with a dimension of heads
    [samples, heads, queries, keys], an argument ``attention_mask``, are narrowed to them. With
    ``shared_keys`` the heads of keys and values stay unsplit.
    """

    def __init__(self, shared_keys: bool = False) -> None:
        super().__init__()
        self.shared_keys = shared_keys

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
        counted = [name for name in HEADS if not (self.shared_keys and name in KEY_HEADS)]
        for name in (*counted, "split_size"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // ranks)

        def narrow(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            alibi, mask = named.get("alibi"), named.get("attention_mask")
            if alibi is not None:
                by_rank = alibi.unflatten(0, (-1, ranks, module.num_heads))
                named = {**named, "alibi": by_rank[:, rank].flatten(0, 1)}
            if alibi is not None and mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                named = {**named, "attention_mask": mask.chunk(ranks, 1)[rank]}
            return inputs, named

        module.register_forward_pre_hook(narrow, with_kwargs=True)
        return module


class MultiQueryOutputs(ParallelStyle):
    """Projects to this rank's heads of queries and to the one head of keys and values that all of them share.

    The weight [queries | key | value, in] stays replicated, as part of every rank's outputs needs all ranks'
    gradients. A rank uses its rows alone, so that the ranks' gradients must be summed.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank, keys = device_mesh.size(), device_mesh.get_local_rank(), 2 * self.head_dim

        def rows(parameter: torch.Tensor) -> torch.Tensor:
            queries = parameter[:-keys].chunk(ranks)[rank]
            return torch.cat([queries, parameter[-keys:]])

        def forward(linear: Any, hidden: torch.Tensor) -> torch.Tensor:
            bias = None if linear.bias is None else rows(linear.bias)
            return nn.functional.linear(sum_gradients(hidden, device_mesh), rows(linear.weight), bias)

        module.forward = MethodType(forward, module)
        return module


class LatentKeys(ParallelStyle):
    """Sums the gradients of the rotary keys that multi-head latent attention projects for all heads together.

    The outputs are latent keys and values. Their projection to heads sums their gradients itself, and behind
    them the ``rotary`` numbers of a key, which each rank's heads use as they are (DeepSeek-V2, arXiv
    2405.04434, section 2.1.3).
    """

    def __init__(self, rotary: int) -> None:
        super().__init__()
        self.rotary = rotary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            latent, keys = output[..., : -self.rotary], output[..., -self.rotary :]
            return torch.cat([latent, sum_gradients(keys, device_mesh)], -1)

        module.register_forward_hook(hook)
        return module
