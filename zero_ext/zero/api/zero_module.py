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
    """A prepared model: calls, attributes and state_dict keys are those of ``module``.

    Adds what a sharded model needs: :meth:`backward` (scales the loss), :meth:`no_sync`,
    :meth:`clip_grad_norm_`, :meth:`full_state_dict`, :meth:`finish_update`. When ``module`` is prepared
    again, its wrappers of before raise ``RuntimeError``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        engine_of(module).wrappers.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module."""
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
        """An ordinary copy of the module, with full values on every rank; a collective where they are
        sharded."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def share_memory(self) -> ZeroModule:
        """Refused, as on the module itself."""
        self.module.share_memory()
        return self

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` with the loss scale of fp16 applied."""
        self.scale_loss(loss).backward(**kwargs)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale; equal to the loss unless parameters are fp16."""
        return engine_of(self).scale_loss(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep unreduced local gradients; the first one outside reduces the sum."""
        with engine_of(self).collector.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their true global norm is at most ``max_norm``; a collective.

        Returns the norm before clipping, 0-d float32. ``norm_type`` 2 or inf. Of fp16 gradients it is the
        norm without the loss scale.
        """
        return engine_of(self).clip_grad_norm_(max_norm, norm_type)

    def finish_update(self) -> None:
        """Makes the parameters follow a delayed update now rather than in the next step, as before an
        evaluation of the newest parameters; a collective. Nothing to do unless ``offload.update_mode`` is
        "delayed".
        """
        engine_of(self).finish_updates()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients."""
        if set_to_none:
            engine_of(self).clear_gradients()
        else:
            super().zero_grad(set_to_none=False)

    def full_state_dict(
        self, *, rank0_only: bool = False, key_filter: Callable[[str], bool] | None = None
    ) -> dict[str, torch.Tensor]:
        """See :func:`zero_ext.full_state_dict`."""
        return full_state_dict(self, rank0_only=rank0_only, key_filter=key_filter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own ``state_dict``. Values of sharded parameters are fetched when used, on all
        ranks alike; pickling them is refused in favor of :func:`zero_ext.full_state_dict`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads whole tensors, present on every rank, at any stage; a collective. See
        :func:`zero_ext.load_full_state_dict`; returns torch's missing and unexpected keys."""
        if assign:
            raise ValueError(
                "load_state_dict: expected assign=False, got assign=True, which would replace "
                "sharded parameters. Leave assign out."
            )
        missing, unexpected = load_full_state_dict(self, state_dict, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own ``named_parameters``, without a prefix of the wrapper."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own ``named_buffers``, without a prefix of the wrapper."""
        return self.module.named_buffers(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ZeroModule:
        self.module._apply(fn)
        return self


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, without a :class:`ZeroModule` around it."""
    return model.module if isinstance(model, ZeroModule) else model
