"""``param.grad`` of sharded gradients: a tensor subclass without memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zero_ext.zero.units.placeholder import ViewSpec, instances_in, map_nested
from zero_ext.zero.units.released_params import MEMORY, function_name

aten = torch.ops.aten
# torch.compile distinguishes tensors by their storages. That of param.grad is empty.
_REFUSED = (MEMORY - {"untyped_storage"}) | {"apply_", "map_", "map2_"}


class GradientAccess(Protocol):
    """The access of a placeholder to the gradient that it stands for."""

    def norm_of(self, key: object, norm_type: float) -> torch.Tensor:
        """Return the norm over all ranks of one parameter's gradient, 0-d float64. A collective."""

    def scale(self, key: object, factor: float, described: str) -> None:
        """Multiply this rank's part of one parameter's gradient, as :meth:`change` would; it may be rounded
        later, and only once."""

    def change(self, key: object, change: Callable[[torch.Tensor], object], described: str) -> None:
        """Apply the element-wise ``change`` in place to this rank's elements of one parameter's gradient;
        ``described`` is compared between the ranks in the next collective."""

    def zero(self, key: object) -> None:
        """Set this rank's part of one parameter's gradient to zero."""

    def read(self, key: object) -> torch.Tensor:
        """Return a copy of one parameter's full gradient in the dtype that is stored. A collective."""

    def write(self, key: object, value: torch.Tensor) -> None:
        """Make ``value``, alike on all ranks, one parameter's gradient. A collective."""


class GradientSource(NamedTuple):
    """One parameter's gradient: how it is reached, the parameter's full name, and its layout as a whole."""

    access: GradientAccess
    key: object
    name: str
    view_spec: ViewSpec


class ShardedGradient(torch.Tensor):
    """Stands for a gradient that is sharded or stored on NVMe, or for a view of it.

    Scaling, clamping and zeroing in place act on the shard, without communication. Norms (2 and inf) are the
    global ones. Everything else fetches the whole gradient for that one call, and writes back what the call
    changes, which must be the same on all ranks. All ranks make the same calls in the same order.
    """

    _source: GradientSource
    _view_spec: ViewSpec

    @staticmethod
    def __new__(
        cls, source: GradientSource, device: torch.device, view_spec: ViewSpec | None = None
    ) -> ShardedGradient:
        own = view_spec or source.view_spec
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, own.shape, own.stride, own.offset, dtype=own.dtype, device=device, requires_grad=False
        )
        made._source, made._view_spec = source, own
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient('{self._source.name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function_name(func) in _REFUSED:
            name = next(instances_in((args, kwargs or {}), ShardedGradient))._source.name
            raise _memory_refusal(name, function_name(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def key(self) -> object:
        """Return the key of the gradient in the access."""
        return self._source.key

    @property
    def data(self) -> torch.Tensor:
        """The gradient itself, which autograd never records."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(
                f"data of '{self._source.name}'.grad: expected a tensor of {tuple(self.shape)} {self.dtype}, "
                f"got {tuple(value.shape)} {value.dtype}. Assign it to param.grad."
            )
        self.copy_(value)

    # Torch dispatches none of these.
    def set_(self, *_: Any, **__: Any) -> Any:
        """Raise ``RuntimeError``: there is no memory to exchange."""
        raise _memory_refusal(self._source.name, "set_")

    def __format__(self, specification: str) -> str:
        return format(self.clone(), specification)

    def __copy__(self) -> ShardedGradient:
        """Return the gradient itself: a shallow copy of a tensor shares its values."""
        return self

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return the values, read-only: a write to them would be lost."""
        array: np.ndarray[Any, Any] = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.clone().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _memory_refusal(self._source.name, "__reduce_ex__")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "_foreach_" in func._schema.name:
            return _one_by_one(func, args, kwargs)
        first = args[0] if args else None
        # For a gradient itself, not for a view of it.
        if isinstance(first, ShardedGradient) and first._view_spec == first._source.view_spec:
            if func in _HANDLERS:
                return _HANDLERS[func](*args, **kwargs)
            if func.overloadpacket in _ELEMENTWISE and all(map(_is_number, (*args[1:], *kwargs.values()))):
                return _change(func, first, args[1:], kwargs)
        if func.is_view:
            return _view(func, args, kwargs)
        return _on_values(func, args, kwargs)


def _memory_refusal(name: str, function: str) -> RuntimeError:
    return RuntimeError(
        f"'{name}'.grad has no memory on this rank: expected a use of its value, got {function}, which is "
        "about its memory. Use param.grad.clone() or zero_ext.full_gradient(param), on all ranks."
    )


def _is_number(value: Any) -> bool:
    """Return whether ``value`` says the same of all elements."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not isinstance(value, ShardedGradient)
    return not isinstance(value, list | tuple)


def _change(
    func: Any, gradient: ShardedGradient, rest: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ShardedGradient:
    # A number may be on another device than what it changes.
    rest, kwargs = map_nested(
        (rest, kwargs), lambda value: _number(value) if isinstance(value, torch.Tensor) else value
    )
    change = func.overloadpacket
    described = f"{change.__name__}{rest}{kwargs or ''}"
    source = gradient._source
    if change is aten.mul_:
        source.access.scale(source.key, float(rest[0]), described)
        return gradient
    source.access.change(source.key, lambda values: change(values, *rest, **kwargs), described)
    return gradient


# Numbers that were read, and the version of the tensor then: clipping multiplies all gradients with one, and
# the host waits for the device whenever it reads a number there.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _number(value: torch.Tensor) -> float:
    if value.is_inference():  # it counts no versions
        return value.item()
    version, number = _read.get(value, (None, 0.0))
    if version != value._version:
        number = value.item()
        _read[value] = value._version, number
    return number


def _vector_norm(
    gradient: ShardedGradient,
    ord: float = 2,
    dim: object = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    source = gradient._source
    if dim or keepdim or ord not in (2, float("inf")):
        more = {"ord": ord, "dim": dim, "keepdim": keepdim, "dtype": dtype}
        norm: torch.Tensor = _on_values(aten.linalg_vector_norm.default, (gradient,), more)
        return norm
    # Of 16 bits in 64, unlike torch: clipping takes the norm of these norms, and in 16 bits its factor would
    # be off by as much as 0.4%.
    result_dtype = gradient.dtype if gradient.dtype.itemsize >= torch.float32.itemsize else torch.float64
    return source.access.norm_of(source.key, float(ord)).to(dtype or result_dtype)


def _zero(gradient: ShardedGradient) -> ShardedGradient:
    gradient._source.access.zero(gradient._source.key)
    return gradient


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return the result of a function of lists, one of their items at a time: whole gradients are large."""
    results: list[Any] = []
    single = _SINGLE.get(func.overloadpacket)
    for number in range(len(args[0])):
        own = [[value[number]] if isinstance(value, list | tuple) else value for value in args]
        if single is not None:
            item = (value[0] if isinstance(value, list) else value for value in own)
            results.append(single(*item, **kwargs))
        else:
            results += _on_values(func, tuple(own), kwargs) or ()
    return results if func._schema.returns else None


def _view(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function that returns views gives: gradients with their positions in the full ones."""
    gradient = next(value for value in args if isinstance(value, ShardedGradient))

    def layout(value: Any) -> Any:
        return value._view_spec.on_meta() if isinstance(value, ShardedGradient) else value

    def at(view: torch.Tensor) -> ShardedGradient:
        return ShardedGradient(gradient._source, gradient.device, ViewSpec.of(view))

    return map_nested(func(*map_nested(args, layout), **map_nested(dict(kwargs), layout)), at)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``func`` on whole gradients, having written back what it changed."""
    if func.namespace != "aten":
        name = next(item._source.name for item in instances_in((args, kwargs), ShardedGradient))
        raise RuntimeError(
            f"gradient of '{name}', sharded over the ranks and already their mean: expected a "
            f"function of its values, got {func}, which works on its memory. Drop that call, or "
            "use zero_ext.full_gradient(param) and assign the result to param.grad."
        )
    written = _written(func, args, kwargs)
    # A sum of passes may be stored in more bits than its dtype shows, and a write must not lose them.
    keep_precision = bool(written) and all(
        item.dtype == item._source.view_spec.dtype for item in instances_in((args, kwargs), ShardedGradient)
    )
    # Several views of one gradient share one value, so a write through one of them shows in the others.
    values: dict[object, torch.Tensor] = {}
    originals: dict[int, ShardedGradient] = {}

    def value_of(item: Any) -> Any:
        if not isinstance(item, ShardedGradient):
            return item
        source, view_spec = item._source, item._view_spec
        if source.key not in values:
            value = source.view_spec.ordered(source.access.read(source.key))
            values[source.key] = value if keep_precision else value.to(source.view_spec.dtype)
        value = values[source.key]
        memory = (view_spec._replace(dtype=value.dtype) if keep_precision else view_spec).view_into(value)
        originals[id(memory)] = item
        return memory

    result = func(*map_nested(args, value_of), **map_nested(dict(kwargs), value_of))
    for source in {item._source.key: item._source for item in written}.values():
        source.access.write(source.key, values[source.key])
    # In-place functions return their argument, and callers expect the gradient itself.
    return map_nested(result, lambda item: originals.get(id(item), item))


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[ShardedGradient]:
    """Return the gradients among the arguments that ``func`` changes in place."""
    found: list[ShardedGradient] = []
    for number, formal in enumerate(func._schema.arguments):
        if formal.alias_info is None or not formal.alias_info.is_write:
            continue
        found += instances_in(
            args[number] if number < len(args) else kwargs.get(formal.name), ShardedGradient
        )
    return found


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: lambda gradient, p=2: _vector_norm(gradient, p),
    aten.norm.ScalarOpt_dim: lambda gradient, p=2, dim=None, keepdim=False: _vector_norm(
        gradient, 2 if p is None else p, dim, keepdim
    ),
    aten.zero_.default: _zero,
    aten.detach.default: lambda gradient: gradient,
}
# In place, and of each element on its own.
_ELEMENTWISE_NAMES = "mul_ div_ add_ sub_ neg_ clamp_ clamp_min_ clamp_max_ nan_to_num_ sign_ fill_"
_ELEMENTWISE = frozenset(getattr(aten, name) for name in _ELEMENTWISE_NAMES.split())
# What a function of lists is of one item, where that needs no whole gradient.
_SINGLE: dict[Any, Any] = {
    aten._foreach_norm: aten.linalg_vector_norm,
    aten._foreach_mul_: aten.mul_,
    aten._foreach_div_: aten.div_,
    aten._foreach_clamp_min_: aten.clamp_min_,
    aten._foreach_clamp_max_: aten.clamp_max_,
    aten._foreach_zero_: aten.zero_,
}
