"""Parameters without a value in memory: any use of one fetches the full value, or raises by name.

A module's forward finds its parameters gathered by the engine's hooks. Whatever else touches a released
parameter reaches :meth:`ReleasedTensor.__torch_function__`. The function then runs on an independent copy of
the full value. Autograd connects that copy to the parameter, and saves a reference in place of the copy, so
that backward fetches the value again. In-place writes are handed to the engine. Views stay lazy: a view of a
released parameter is a :class:`ReleasedView`, which fetches the value when it is used and writes to it when
it is written to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from zero_ext.zero.units.dtensor_local import is_distributed
from zero_ext.zero.units.placeholder import ViewSpec, instances_in, map_nested, placeholder

# True of a placeholder too. Autograd's own calls refer to the tensor itself, whatever its value.
METADATA_NAMES = """
    shape size dim ndim ndimension numel nelement __len__ dtype device layout itemsize element_size nbytes
    names is_floating_point is_complex is_signed is_meta is_sparse is_sparse_csr is_quantized is_nested
    is_cuda is_cpu is_xpu is_mps is_xla is_mkldnn is_vulkan is_inference get_device requires_grad
    requires_grad_ is_leaf grad grad_dtype grad_fn output_nr retains_grad retain_grad _version _backward_hooks
    _post_accumulate_grad_hooks register_hook register_post_accumulate_grad_hook detach_ _is_view _base
    backward __hash__ __setattr__ __repr__ __format__
"""
METADATA = frozenset(METADATA_NAMES.split())
"""Names of the functions that say nothing about a parameter's value or memory layout."""
# Answered by a tensor without values that has the true layout.
_LAYOUT_NAMES = """
    stride is_contiguous storage_offset dim_order is_non_overlapping_and_dense empty_like zeros_like
    ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
    new_empty_strided new_tensor
"""
_LAYOUT = frozenset(_LAYOUT_NAMES.split())
_CREATES = frozenset(name for name in _LAYOUT if name.endswith("_like") or name.startswith("new_"))
# There is no one memory behind a released parameter to point at, share or replace.
_MEMORY_NAMES = """
    data_ptr untyped_storage storage _typed_storage storage_type __cuda_array_interface__ __dlpack__
    _to_dlpack share_memory_ is_shared set_ resize_ resize_as_ as_strided_ __reduce_ex__
    __setstate__ module_load
"""
MEMORY = frozenset(_MEMORY_NAMES.split())
"""Names of the functions that need a tensor's memory."""
_ACCESS = "_zero_ext_access"
_DATA = "_zero_ext_data"  # of a parameter: the tensors that its ``data`` was, while they are alive
_get_data: Callable[..., Any] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data: Callable[..., Any] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Access(Protocol):
    """Reads and writes the value of a released parameter; both are collectives."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return an independent copy of the full value."""

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Make ``value``, alike on all ranks, the parameter's value."""

    def facts(self, parameter: nn.Parameter) -> ParameterFacts:
        """Return the facts of the parameter that need no value."""


class ParameterFacts(NamedTuple):
    """Full name and memory order of a parameter; ``generation`` changes with its value."""

    name: str
    stride: tuple[int, ...]
    generation: int = 0


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function passed to ``__torch_function__``, of a property that of the property."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return str(name)


class GatheredParameter(nn.Parameter):
    """A parameter with its full value in memory. ``data`` shares the version counter and the memory, so the
    engine notices every write through it."""

    @property
    def data(self) -> torch.Tensor:
        """The value, without autograd."""
        return _remembered(self, self.detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_new_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter."""
        if id(self) not in memo:
            value = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(value, self.requires_grad)
        return memo[id(self)]


class ReleasedTensor:
    """Mixed into the class of a parameter without a value in memory, and of views of it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _perform(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The value, without autograd; read when it is used, written when it is written to."""
        return _get_data(self)  # by way of torch's function modes

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary parameter with the full value, or an ordinary tensor with that of the view."""
        if id(self) in memo:
            return memo[id(self)]
        parameter, view_spec = origin(self)
        value = _access(parameter).read(parameter)
        # DTensor's own constructor has other arguments.
        kind: Any = nn.Parameter if is_distributed(value) else plain_class(parameter)
        made = (
            kind(value, parameter.requires_grad) if view_spec is None else view_spec.view_into(value).clone()
        )
        memo[id(self)] = made
        return made

    # Torch does not dispatch these two methods through __torch_function__.
    def set_(self, *_: Any, **__: Any) -> Any:
        """Raise ``RuntimeError``: there is no memory to exchange."""
        raise _memory_refusal(self, "set_")

    def as_subclass(self, *_: Any) -> Any:
        """Raise ``RuntimeError``: there is no memory to share."""
        raise _memory_refusal(self, "as_subclass")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        parameter, _view_spec = origin(self)
        described = f"shape={tuple(self.shape)}, dtype={self.dtype}"  # type: ignore[attr-defined]
        return f"<{type(self).__name__} '{_name(parameter)}', {described}>"


class ReleasedView(ReleasedTensor, torch.Tensor):  # type: ignore[misc]
    """A view of a released parameter: :class:`ViewSpec` of its memory, fetched when it is used."""


@functools.cache
def released_class(kind: type) -> Any:
    """Return the class of a parameter of class ``kind`` while its value is not in memory."""
    return type(kind)(f"Released{kind.__name__}", (ReleasedTensor, kind), {"__module__": kind.__module__})


def gathered_class(kind: type) -> type:
    """Return the class of a parameter of class ``kind`` while the engine has its value in memory."""
    return GatheredParameter if kind is nn.Parameter else kind


def plain_class(parameter: nn.Parameter) -> type:
    """Return the class that ``parameter`` had before the engine changed it."""
    kind: type = type(parameter)
    if issubclass(kind, ReleasedTensor):
        # ``released_class`` derives from ``ReleasedTensor`` and the former class, in this order.
        kind = kind.__mro__[2]
    return nn.Parameter if kind is GatheredParameter else kind


def release_to(parameter: nn.Parameter, access: Access) -> None:
    """Declare that the value of ``parameter`` is not in memory, and is used through ``access``. It stays the
    same object and an instance of its class; ``type`` is a subclass meanwhile."""
    setattr(parameter, _ACCESS, access)
    parameter.__class__ = released_class(plain_class(parameter))


def restore_class(parameter: nn.Parameter) -> None:
    """End :func:`release_to`, and drop the access; the class of a parameter that is not released stays."""
    if issubclass(type(parameter), ReleasedTensor):
        parameter.__class__ = plain_class(parameter)
    vars(parameter).pop(_ACCESS, None)


def set_access(parameter: nn.Parameter, access: Access) -> None:
    """Set the access to the value of ``parameter`` whenever it is released."""
    setattr(parameter, _ACCESS, access)


def _access(parameter: nn.Parameter) -> Access:
    found: Access | None = vars(parameter).get(_ACCESS)
    if found is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} was used while zero_ext.prepare shards it: its "
            "value is not in memory. Use it before prepare, or after prepare has returned."
        )
    return found


def _name(parameter: nn.Parameter) -> str:
    return _access(parameter).facts(parameter).name


def origin(tensor: Any) -> tuple[nn.Parameter, ViewSpec | None]:
    """Return the parameter that a released tensor is or is a view of, and the spec of that view."""
    return vars(tensor).get("_zero_ext_view") or (tensor, None)


def _remembered(parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    """Return ``data`` and remember it: it does not change when ``.data = ...`` replaces the parameter's."""
    vars(parameter).setdefault(_DATA, weakref.WeakSet()).add(data)
    return data


def _set_new_data(target: Any, value: Any) -> None:
    """Do what ``.data = value`` does to a plain tensor: tensors that were its data before do not change."""
    parameter, _ = origin(target)
    if not isinstance(value, torch.Tensor) or value.shape != target.shape or value.dtype != target.dtype:
        is_tensor = isinstance(value, torch.Tensor)
        got = f"{tuple(value.shape)} {value.dtype}" if is_tensor else type(value).__name__
        raise RuntimeError(
            f"data of parameter '{_name(parameter)}': expected a tensor of {tuple(target.shape)} "
            f"{target.dtype}, got {got}. Change the model's shapes and dtypes before zero_ext.prepare."
        )
    with torch.no_grad():
        value = value.clone()  # it may be one of them
        for data in vars(parameter).pop(_DATA, ()):
            copied = data.clone()
            data.__class__ = torch.Tensor
            _set_data(data, copied)
        target.copy_(value)


def _memory_refusal(released: Any, function: str) -> RuntimeError:
    return RuntimeError(
        f"parameter '{_name(origin(released)[0])}' has no memory on this rank: expected a use of its value, "
        f"got {function}, which is about its memory. Do it inside 'with zero_ext.gathered(params):', or use "
        "zero_ext.full_state_dict(model)."
    )


def _perform(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = function_name(func)
    # A ``DTensor`` knows its layout itself.
    if name in METADATA or (name in _LAYOUT and any(map(is_distributed, args))):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in MEMORY:
        raise _memory_refusal(next(instances_in((args, kwargs), ReleasedTensor)), name)
    if name in _LAYOUT:
        return _on_layout(func, name, args, kwargs)
    if name == "__iter__":
        return iter(_perform(torch.Tensor.unbind, args, {}))
    if name == "data" and len(args) == 2:
        return _set_new_data(*args)
    if name in ("data", "detach") and is_distributed(args[0]):
        return _Use().run(torch.Tensor.detach, args, {})
    if name in ("data", "detach"):
        view = view_of_released(*_view_origin(args[0]))
        return _remembered(origin(view)[0], view) if name == "data" else view
    if name in ("view_as", "expand_as") and len(args) == 2 and args[0] is args[1]:
        # How torch finds the node that accumulates a leaf's gradient, behind that of such a view.
        tracked = torch.is_grad_enabled() and args[0].requires_grad
        return view_of_released(*_view_origin(args[0]), args[0] if tracked else None)
    return _Use().run(func, args, kwargs)


def _view_origin(released: Any) -> tuple[nn.Parameter, ViewSpec]:
    """Return :func:`origin`, for a parameter with the view spec of the full value in memory of its own."""
    parameter, view_spec = origin(released)
    if view_spec is None:
        stride = _access(parameter).facts(parameter).stride
        view_spec = ViewSpec(parameter.dtype, tuple(parameter.shape), stride, 0)
    return parameter, view_spec


def _on_layout(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``func`` on tensors without values that have the true layout."""

    def layout(item: Any) -> Any:
        return _view_origin(item)[1].on_meta() if isinstance(item, ReleasedTensor) else item

    if name in _CREATES and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": next(instances_in((args, kwargs), ReleasedTensor)).device}  # type: ignore[attr-defined]
    return func(*map_nested(args, layout), **map_nested(dict(kwargs), layout))


def view_of_released(
    parameter: nn.Parameter, view_spec: ViewSpec, source: torch.Tensor | None = None
) -> ReleasedView:
    """Return the view of ``parameter`` at ``view_spec``, with the gradient of ``source``, a view too."""
    blank = placeholder(view_spec.shape, view_spec.dtype, parameter.device)
    view: Any = torch.Tensor._make_subclass(ReleasedView, blank)
    view._zero_ext_view = (parameter, view_spec)
    attached: ReleasedView = view if source is None else _Attached.apply(source, [view])
    return attached


class _Attached(torch.autograd.Function):
    """Makes a tensor that autograd has not seen stand for ``source``."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        # The tensor comes in a list because autograd replaces an argument that forward returns by
        # another object, which lacks the attributes of a ``ReleasedView``.
        return held[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Saved(NamedTuple):
    """A tensor that autograd saved, as a view of a parameter's value at that time."""

    parameter: nn.Parameter
    view_spec: ViewSpec
    generation: int

    def fetch(self) -> torch.Tensor:
        access = _access(self.parameter)
        facts = access.facts(self.parameter)
        if facts.generation != self.generation:
            raise RuntimeError(
                f"backward: expected the value of parameter '{facts.name}' that forward used, but the "
                "parameter was updated or written to since. Run backward before optimizer.step()."
            )
        return self.view_spec.view_into(access.read(self.parameter))


class _StandIn(NamedTuple):
    """A tensor that replaces a released one in a call, as it was before the call."""

    released: Any
    value: torch.Tensor
    version: int
    node: Any  # of autograd


class _Use:
    """One call of a torch function on the full values of released tensors."""

    def __init__(self) -> None:
        self._values: dict[nn.Parameter, torch.Tensor] = {}
        self._parameter_of: dict[int, nn.Parameter] = {}  # by storage of the value
        self._stand_ins: dict[int, _StandIn] = {}  # by the identity of the tensor

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``func``, having written what it wrote."""
        args, kwargs = map_nested(args, self._resolve), map_nested(dict(kwargs), self._resolve)
        if torch.is_grad_enabled():
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        self._write()
        return map_nested(result, self._seen_as)

    def _resolve(self, item: Any) -> Any:
        if not isinstance(item, ReleasedTensor):
            return item
        released: Any = item
        parameter, view_spec = origin(released)
        if parameter not in self._values:
            self._values[parameter] = _access(parameter).read(parameter)
        value = self._values[parameter]
        if not is_distributed(value):
            self._parameter_of[value.untyped_storage()._cdata] = parameter
            # Inference tensors have no version counter, by which ``_write`` finds in-place writes.
            with torch.inference_mode(False):
                value = (view_spec or ViewSpec.of(value)).view_into(value)
        if torch.is_grad_enabled() and released.requires_grad:
            value = _Attached.apply(released, [value])
        # The entry holds ``value``, so no other tensor gets its id.
        self._stand_ins[id(value)] = _StandIn(released, value, value._version, value.grad_fn)
        return value

    def _owner(self, tensor: Any) -> nn.Parameter | None:
        """Return the parameter with a fetched value that contains ``tensor``."""
        if not isinstance(tensor, torch.Tensor) or is_distributed(tensor) or tensor.layout != torch.strided:
            return None
        return self._parameter_of.get(tensor.untyped_storage()._cdata)

    def _pack(self, tensor: torch.Tensor) -> Any:
        parameter = self._owner(tensor)
        if parameter is None:
            return tensor
        return _Saved(parameter, ViewSpec.of(tensor), _access(parameter).facts(parameter).generation)

    def _write(self) -> None:
        # Everything is checked before the first write. Every write is a collective, so the order
        # has to be the same on all ranks: a dict keeps that of the arguments.
        written: dict[nn.Parameter, None] = {}
        for released, value, version, node in self._stand_ins.values():
            if value._version == version:
                continue
            parameter, _ = origin(released)
            if node is not None and value.grad_fn is not node:
                raise RuntimeError(
                    f"parameter '{_name(parameter)}', which requires grad: expected no write in place "
                    "while autograd records, got one. Write inside 'with torch.no_grad():'."
                )
            if value.shape != released.shape or value.dtype != released.dtype:
                raise RuntimeError(
                    f"parameter '{_name(parameter)}': expected its shape {tuple(released.shape)} to stay, "
                    f"got {tuple(value.shape)}. Change shapes before zero_ext.prepare."
                )
            written[parameter] = None
        for parameter in written:
            _access(parameter).write(parameter, self._values[parameter])

    def _seen_as(self, result: Any) -> Any:
        """Return what the caller gets for ``result``: views of fetched values stay lazy."""
        if isinstance(result, np.ndarray):
            result.flags.writeable = False  # a write to it would be lost
            return result
        stand_in = self._stand_ins.get(id(result))
        if stand_in is not None:
            return stand_in.released
        parameter = self._owner(result)
        if parameter is None:
            return result
        # A ``ViewSpec`` has no conjugate or negative bit, so such a view becomes a tensor of its own.
        if result.is_conj() or result.is_neg():
            return result.resolve_conj().resolve_neg()
        return view_of_released(parameter, ViewSpec.of(result), result if result.requires_grad else None)


def _unpack(packed: Any) -> torch.Tensor:
    return packed.fetch() if isinstance(packed, _Saved) else packed
