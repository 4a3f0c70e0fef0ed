"""``zero.Init`` under DeepSpeed's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.integrations.deepspeed.arguments import check_others, json_values
from zero_ext.integrations.deepspeed.comm import init_distributed
from zero_ext.integrations.deepspeed.param_attributes import mark
from zero_ext.zero.construction.sharded_init import Init as NativeInit

# What says where parameters are initialized; everything else counts from initialize on.
_KEYS = ("stage", "offload_param")
_WITHOUT_EFFECT = ("mem_efficient_linear", "pin_memory", "tensor_overrides", "zero_quantized_weights")
_MISSING = {
    "mpu": "model parallelism",
    "zero_param_parallel_group": "a node's group of the caller's; write zero_hpz_partition_size in the JSON",
    "zero_quantized_nontrainable_weights": "frozen weights kept in codes",
    "sequence_data_parallel_group": "sequence parallelism",
    "param_swapper": "a swapper of the caller's; write offload_param in the JSON",
}


class Init:
    """Shard parameters while a model is built: ``with deepspeed.zero.Init(config_dict_or_path=json): ...``.

    See :class:`zero_ext.Init`. Values "auto" in the JSON do not matter here. ``dtype`` is the default dtype
    inside the block; without it parameters are initialized in the dtype that they are built in and become the
    JSON's in ``initialize``. ``module`` is a built model. Its parameters
    are sharded now. ``remote_device`` "cpu" is ``offload_param.device``. Like DeepSpeed's it starts
    torch.distributed, also for one process.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        *,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        remote_device: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        **others: Any,
    ) -> None:
        check_others("zero.Init", others, _MISSING, _WITHOUT_EFFECT)
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._settings = _settings(source, remote_device)
        init_distributed()
        self._group = data_parallel_group
        self._dtype = dtype
        self._default_dtype = torch.get_default_dtype()
        self._native: _MarkingInit | None = None
        self._enabled = enabled and self._settings.stage == 3
        if module is not None and self._enabled:
            with self:
                self._require().adopt(module)

    def __enter__(self) -> Init:
        if self._enabled:
            ranks = dist.get_world_size(self._group)
            self._native = _MarkingInit(ranks, self._settings, process_group=self._group)
            self._default_dtype = torch.get_default_dtype()
            self._native.__enter__()
            if self._dtype is not None:
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            torch.set_default_dtype(self._default_dtype)
            self._require().__exit__(*error)
            self._native = None

    def _require(self) -> _MarkingInit:
        if self._native is None:
            raise RuntimeError("zero.Init: this one was not entered. Use it in a with statement.")
        return self._native


class _MarkingInit(NativeInit):
    """Gives the parameters that are built DeepSpeed's attributes, also on one rank, which shards none."""

    def __init__(self, ranks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def __exit__(self, *error: Any) -> None:
        modules = list(self._modules)
        super().__exit__(*error)
        found = {parameter: None for module in modules for parameter in module.parameters(recurse=False)}
        mark(found, self._ranks)

    def adopt(self, module: nn.Module) -> None:
        """Shard a module that was built before."""
        self._on_module(module, "", module)


def _settings(source: Mapping[str, Any] | str | Path | None, remote_device: str | None) -> ZeroConfig:
    values = {} if source is None else json_values("zero.Init", source)
    zero = dict(values.get("zero_optimization") or {}) if source is not None else {"stage": 3}
    selected: dict[str, Any] = {"zero_optimization": {key: zero[key] for key in _KEYS if key in zero}}
    if remote_device in ("cpu", "nvme"):
        selected["zero_optimization"].setdefault("offload_param", {"device": remote_device})
    if "aio" in values:
        selected["aio"] = values["aio"]
    return load_deepspeed_config({**selected, "gradient_clipping": 0}).config
