"""The thin wrapper that ``prepare`` returns around the user's module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.full_parameters import full_state_dict, load_full_state_dict
from zero_ext.zero.memory.lifetime import refuse_ended


class ZeroModule(nn.Module):
    """A prepared model with the calls, attributes and state_dict keys of `module`.

    [`prepare`][zero_ext.prepare] makes it. It adds what a sharded model needs: `backward` (scales the loss),
    `no_sync`, `clip_grad_norm_`, `full_state_dict`, `finish_update`. When `module` is prepared again, its
    earlier wrappers raise `RuntimeError`.

    Args:
        module: a module that an engine belongs to already.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> isinstance(model, zero_ext.ZeroModule)
        True
        >>> with model.no_sync():  # accumulate without reducing
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> norm = model.clip_grad_norm_(1.0)
        >>> round(norm.item(), 2)
        18.97
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        engine_of(module).wrappers.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            What the module returns.
        """
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        refuse_ended(self)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module" or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return an ordinary copy of the module, with full values on every rank; a collective where they are
        sharded."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def share_memory(self) -> ZeroModule:
        """Raise: sharing would move parameters away from their shards.

        Returns:
            Nothing.

        Raises:
            RuntimeError: always.
        """
        self.module.share_memory()
        return self

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run `loss.backward()` with the loss scale of fp16 applied.

        Args:
            loss: 0-d, as computed.
            **kwargs: passed on to `loss.backward`.
        """
        self.scale_loss(loss).backward(**kwargs)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, on which to call `backward`.

        Args:
            loss: 0-d, as computed.

        Returns:
            The scaled loss in float32 if parameters are fp16, else `loss` itself.
        """
        return engine_of(self).scale_loss(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside local and unreduced.

        The first backward pass outside reduces the sum.

        Yields:
            Nothing.
        """
        with engine_of(self).collector.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their true global norm is at most `max_norm`; a collective.

        Args:
            max_norm: the largest norm allowed.
            norm_type: 2 or infinity.

        Returns:
            The norm before clipping, 0-d float32. Of fp16 gradients it is the norm without the loss scale.
        """
        return engine_of(self).clip_grad_norm_(max_norm, norm_type)

    def finish_update(self) -> None:
        """Make the parameters follow a delayed update now rather than in the next step; a collective.

        Call it before an evaluation that needs the newest parameters. It does nothing unless
        `offload.update_mode` is "delayed".
        """
        engine_of(self).finish_updates()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients.

        Args:
            set_to_none: False fills them with zeros instead, as in torch.
        """
        if set_to_none:
            engine_of(self).clear_gradients()
        else:
            super().zero_grad(set_to_none=False)
            engine_of(self).optimizer_step.forget_experts()

    def full_state_dict(
        self, *, rank0_only: bool = False, key_filter: Callable[[str], bool] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return every parameter and persistent buffer in full; a collective.

        Args:
            rank0_only: the other ranks get an empty dict.
            key_filter: selects keys; must return the same on all ranks.

        Returns:
            As [`zero_ext.full_state_dict`][zero_ext.full_state_dict].
        """
        return full_state_dict(self, rank0_only=rank0_only, key_filter=key_filter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own `state_dict`.

        Values of sharded parameters are fetched when they are used, on all ranks alike. Pickling them raises
        an error that names `zero_ext.full_state_dict`.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            The module's `state_dict`.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full tensors, present on every rank, at any stage; a collective.

        Args:
            state_dict: full tensors by name, as for
                [`zero_ext.load_full_state_dict`][zero_ext.load_full_state_dict].
            strict: raise for missing and unexpected keys.
            assign: only False is supported.

        Returns:
            Torch's named tuple of `missing_keys` and `unexpected_keys`.

        Raises:
            ValueError: `assign` is true, keys are missing or unexpected while `strict`, or a shape is wrong.
        """
        if assign:
            raise ValueError(
                "load_state_dict: expected assign=False, got assign=True, which would replace "
                "sharded parameters. Leave assign out."
            )
        missing, unexpected = load_full_state_dict(self, state_dict, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's own `named_parameters`, without a prefix of the wrapper.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            Pairs of name and parameter.
        """
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the module's own `named_buffers`, without a prefix of the wrapper.

        Args:
            *args: passed on.
            **kwargs: passed on.

        Returns:
            Pairs of name and buffer.
        """
        return self.module.named_buffers(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ZeroModule:
        self.module._apply(fn)
        return self


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module itself, without a :class:`ZeroModule` around it."""
    return model.module if isinstance(model, ZeroModule) else model
