"""Construction of models under DeepSpeed's names: ``zero.Init``, ``OnDevice``, ``zero.TiledLinear``, leaf
modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.integrations.deepspeed.deepspeed_accelerator import get_accelerator
from zero_ext.integrations.deepspeed.deepspeed_comm import init_distributed
from zero_ext.integrations.deepspeed.deepspeed_config import check_others, json_values
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.integrations.deepspeed.zero_parameters import mark
from zero_ext.zero.construction.sharded_init import Init as NativeInit
from zero_ext.zero.tiling import TiledLinear as NativeTiledLinear

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


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Inside the block modules and tensors are made on ``device``, floating-point ones in ``dtype``."""
    before = torch.get_default_dtype()
    with torch.device(device) if enabled else contextlib.nullcontext():
        try:
            torch.set_default_dtype(dtype if enabled else before)
            yield
        finally:
            torch.set_default_dtype(before)


class TiledLinear(NativeTiledLinear):
    """:class:`zero_ext.TiledLinear` with the plain layer's state dict and DeepSpeed's ``init_linear``.

    ``input_is_already_split``, ``combine_out_splits=False`` and another ``linear_cls`` than ``nn.Linear``
    raise :class:`DeepSpeedFeatureError`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        *,
        init_linear: nn.Linear | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, in_splits, out_splits, device=device, dtype=dtype)
        expected = {"input_is_already_split": False, "combine_out_splits": True, "linear_cls": nn.Linear}
        for name, value in others.items():
            if name not in expected:
                raise TypeError(
                    f"TiledLinear: expected its own arguments or {', '.join(expected)}, got {name!r}. "
                    "Leave it out."
                )
            if value != expected[name]:
                raise DeepSpeedFeatureError(
                    f"TiledLinear({name}={value!r}): it is not supported: tiles are plain linear layers over "
                    "the full input. Use TiledLinear.chunks(inputs) to take the output one tile at a time."
                )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take over the values of a plain layer of the same shape."""
        self.load_state_dict(other.state_dict())


_MARK = "_z3_leaf"


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Mark the modules of these classes, given as classes or by name; before ``initialize``. Returns them.

    ``ValueError`` if there are none.
    """
    wanted = tuple(leaf_module_classes)

    def fits(_: str, module: nn.Module) -> bool:
        own = type(module)
        return any(item in (own, own.__name__, f"{own.__module__}.{own.__qualname__}") for item in wanted)

    return _mark(model, fits, f"of the classes {list(wanted)}")


def set_z3_leaf_modules_by_name(model: nn.Module, leaf_module_names: Iterable[str]) -> list[nn.Module]:
    """Mark the modules of these full names; see :func:`set_z3_leaf_modules`."""
    wanted = set(leaf_module_names)
    return _mark(model, lambda name, _: name in wanted, f"named {sorted(wanted)}")


def set_z3_leaf_modules_by_suffix(model: nn.Module, leaf_module_suffixes: Iterable[str]) -> list[nn.Module]:
    """Mark the modules with names that end so; see :func:`set_z3_leaf_modules`."""
    wanted = tuple(leaf_module_suffixes)
    return _mark(model, lambda name, _: name.endswith(wanted), f"with names that end in {list(wanted)}")


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or takes its mark away."""
    setattr(model, _MARK, bool(flag))


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Take the marks of these classes away; return the modules."""
    found = set_z3_leaf_modules(model, leaf_module_classes)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked."""
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def leaf_modules_of(model: nn.Module) -> list[str]:
    """Return the full names of all marked modules."""
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


def _mark(model: nn.Module, fits: Callable[[str, nn.Module], bool], words: str) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found:
        raise ValueError(f"{type(model).__name__}: it has no modules {words}. Name some of its modules.")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


# Hugging Face replaces these three for a moment around `zero.Init`.
__all__ = ["_orig_torch_arange", "get_accelerator", "zero_wrapper_for_fp_tensor_constructor"]
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_dtype: object
) -> Callable[..., Any]:
    """``fn`` itself: no constructor changes its dtype or device here, so none has to be wrapped."""
    return fn
