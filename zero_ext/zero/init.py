"""``Init``: models that are sharded while they are built, so that no rank ever holds one whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from zero_ext.comm import Collectives
from zero_ext.config import ZeroConfig, load_config
from zero_ext.zero.born import full_value, is_born_sharded, shard_at_birth
from zero_ext.zero.process_group import join_world, make_collectives

WHOLE_ELEMENTS_LIMIT = 8 * 1024 * 1024
METADATA = {
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad",
    "grad_fn",
    "names",
    "ndim",
}
METADATA |= {"is_meta", "is_sparse", "is_quantized", "is_cuda", "is_cpu", "_version", "_backward_hooks"}
METADATA |= {
    "size",
    "numel",
    "dim",
    "stride",
    "is_floating_point",
    "is_complex",
    "requires_grad_",
    "__hash__",
}
METADATA |= {
    "nelement",
    "__len__",
    "ndimension",
    "is_contiguous",
    "element_size",
    "nbytes",
    "itemsize",
    "__setattr__",
}


class Init:
    """``with zero_ext.Init(config): model = Model(...)`` builds ``Model`` born sharded; a collective.

    Each parameter is made whole, initialised as always and then cut into shards, one after another, so the
    same seed on every rank gives the same weights as plain construction, bit for bit, at every world size.
    Code that initialises parameters again later (``module.apply(init)``) sees them whole. Parameters made
    on the meta device are materialised at the end by their module's ``reset_parameters``, in order of
    construction; a module without one raises ``ValueError`` naming it. On one rank nothing is sharded.

    Give the same ``process_group`` as to :func:`zero_ext.prepare`.
    """

    def __init__(
        self,
        config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        settings = load_config(config)
        join_world(settings.timeout_seconds)
        self._collectives = make_collectives(process_group, settings.timeout_seconds)
        self._sharding = self._collectives.world_size > 1 and settings.stage == 3
        self._births = _Births(self._collectives) if self._sharding else None
        self._owners: OrderedDict[int, nn.Module] = OrderedDict()
        self._mode: _WholeOnTouch | None = None
        self._register: Any = None

    def __enter__(self) -> Init:
        register = self._register = nn.Module.register_parameter
        births, owners = self._births, self._owners

        def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(module, name, parameter)
            if parameter is not None:
                owners[id(module)] = module
                if births is not None and not parameter.is_meta:
                    births.whole(parameter)

        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign,assignment]
        if births is not None:
            self._mode = _WholeOnTouch(births)
            self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._materialise_meta()
        finally:
            if self._mode is not None:
                self._mode.__exit__(kind, error, trace)
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]
            if self._births is not None and kind is None:
                self._births.shard_all()
            self._owners.clear()

    def _materialise_meta(self) -> None:
        made: dict[int, nn.Parameter] = {}
        for module in list(self._owners.values()):
            own = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
            if not own:
                continue
            fresh = [name for name, parameter in own.items() if id(parameter) not in made]
            for name, parameter in own.items():
                if id(parameter) not in made:
                    value = torch.empty_like(parameter, device="cpu")
                    made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if not fresh:
                continue
            if reset is None:
                raise ValueError(
                    f"{type(module).__name__} was built on the meta device with parameters {fresh} and "
                    f"has no "
                    "reset_parameters to initialise them. Build it inside zero_ext.Init without "
                    "torch.device('meta'), or pass values='empty' to zero_ext.prepare and load a checkpoint."
                )
            reset()


class _Births:
    """Parameters that are whole for now, oldest first; the oldest are sharded when too many are."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._whole: OrderedDict[int, nn.Parameter] = OrderedDict()

    def whole(self, parameter: nn.Parameter) -> None:
        """``parameter`` was made, or made whole again."""
        self._whole[id(parameter)] = parameter
        self._whole.move_to_end(id(parameter))
        while len(self._whole) > 1 and sum(p.numel() for p in self._whole.values()) > WHOLE_ELEMENTS_LIMIT:
            _, oldest = self._whole.popitem(last=False)
            shard_at_birth(oldest, self._collectives)

    def touch(self, parameter: nn.Parameter) -> None:
        """``parameter`` is about to be read or written."""
        if is_born_sharded(parameter):
            parameter.data = full_value(parameter, self._collectives)
            self.whole(parameter)
        elif id(parameter) in self._whole:
            self._whole.move_to_end(id(parameter))

    def shard_all(self) -> None:
        """Cuts everything that is still whole."""
        while self._whole:
            _, parameter = self._whole.popitem(last=False)
            shard_at_birth(parameter, self._collectives)


class _WholeOnTouch(TorchFunctionMode):
    """Makes parameters whole before any torch function sees them, but for pure questions of metadata."""

    def __init__(self, births: _Births) -> None:
        super().__init__()
        self._births = births

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in METADATA:
            for value in (*args, *(kwargs or {}).values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, nn.Parameter):
                        self._births.touch(item)
        return func(*args, **(kwargs or {}))
