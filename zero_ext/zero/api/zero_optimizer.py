"""The optimizer the user holds: a real ``torch.optim.Optimizer``. Its step runs on the shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zero_ext.config.config_errors import clause_of
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import Values, copy_of, count, replace
from zero_ext.optim import Stepper, make_stepper, moments_dtype_named
from zero_ext.optim.elementwise import on_other_tensors
from zero_ext.optim.optimizer_registry import needs_whole_tensors
from zero_ext.zero.api.engine_state import owned_state, unsharded_state
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import DeferredError, ranks_where


class ZeroOptimizer(torch.optim.Optimizer):
    """Step a prepared model. `param_groups` are the user's own dicts, live: schedulers may change them.

    [`prepare`][zero_ext.prepare] makes it.

    Args:
        engine: the engine of the model.
        optimizer: the optimizer that was given to `prepare`.
        elementwise: the class of `optimizer` was declared to be element-wise.

    Attributes:
        engine: the engine of the model.
        optimizer: the optimizer that was given to `prepare`.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, elementwise: bool) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.engine = engine
        self.optimizer = optimizer
        self._last_skipped = False
        moments = moments_dtype_named(engine.config.precision.moments_dtype)
        engine.optimizer_step.attach(
            self.param_groups,
            self.defaults,
            lambda ranges, groups, total, exchange: make_stepper(
                on_other_tensors(optimizer, groups),
                ranges,
                moments,
                elementwise,
                engine.tiers,
                total,
                exchange,
            ),
            engine.full_tensors,
            needs_whole_tensors(optimizer),
        )

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because fp16 gradients overflowed."""
        return self.engine.skipped_steps

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because fp16 gradients overflowed.

        A schedule then waits.
        """
        return self._last_skipped

    @property
    def loss_scale(self) -> float:
        """The loss scale in force; 1 unless parameters are fp16."""
        step = self.engine.optimizer_step
        return step.scaler.scale if step.scales_loss else 1.0

    @property
    def overflow(self) -> bool:
        """`step_was_skipped` by the name that Accelerate reads from DeepSpeed's optimizers."""
        return self._last_skipped

    @property
    def rolled_back_steps(self) -> int:
        """Steps with updates that were made in backward and rolled back.

        The gradients had to be clipped or had overflowed (`offload.update_mode` "in_backward").
        """
        return self.engine.updates.rolled_back_steps

    @property
    def committed_steps(self) -> int:
        """Steps with speculative updates in backward that turned out right and were kept."""
        return self.engine.updates.committed_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale, clip, update and publish the parameters; a collective of all ranks.

        With delayed updates (`offload.update_mode`) the parameters follow the previous step.

        Args:
            closure: computes the loss again, with gradients enabled, before the update.

        Returns:
            What `closure` returned; None without one.

        Raises:
            RuntimeError: there are no gradients, or this is inside backward.
            FloatingPointError: gradients, or weights or moments after the update, are not finite
                (`check_finite`).
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._last_skipped = not self.engine.step()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. Memory for them is kept.

        Args:
            set_to_none: False fills them with zeros instead, as in torch.
        """
        if set_to_none:
            self.engine.clear_gradients()
        else:
            super().zero_grad(set_to_none=False)
            self.engine.optimizer_step.forget_experts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise once the model is prepared: its parameters were laid out then.

        Args:
            param_group: as for torch's optimizers.

        Raises:
            RuntimeError: the model is prepared.
        """
        # torch's constructor calls this method for each group, before ``engine`` is set.
        if hasattr(self, "engine"):
            raise RuntimeError(
                "add_param_group: expected every parameter before zero_ext.prepare, got a group after it. "
                "Give it to the optimizer before prepare, with lr 0 if it can wait for later."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's optimizer state, after waiting for a delayed update.

        It fits only the same ranks and configuration. Checkpoints for other world sizes or stages are written
        by [`save_checkpoint`][zero_ext.save_checkpoint].

        Returns:
            `shards` (tensors by kind, parameter and first element), `unsharded` (tensors with shapes of
            their own, by kind and parameter), `scalars`, `param_groups` and `layout`.
        """
        stepper = self._stepper()
        self.engine.optimizer_step.wait()
        self.engine.follow_writes()
        shards = {key: copy_of(values) for key, values in self._live_shards().items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        for group, live in zip(groups, self.param_groups, strict=True):
            group["params"] = [self.engine.names[parameter][0] for parameter in live["params"]]
        engine = self.engine
        world = {"rank": engine.rank, "world_size": engine.world_size, "stage": engine.config.stage}
        return {
            "shards": shards,
            "unsharded": {key: tensor.clone() for key, tensor in self._live_unsharded().items()},
            "scalars": stepper.scalars(),
            "param_groups": groups,
            "layout": world,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the `state_dict` of the same rank, world size, stage and model; a collective.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            ValueError: it does not fit; nothing was changed.
        """
        self.engine.finish_updates()
        own, stepper, updates = self.state_dict(), self._stepper(), self.engine.updates
        loaded: dict[str, torch.Tensor] = {}
        live: dict[str, Values] = {}
        unsharded: dict[str, torch.Tensor] = {}
        undo: list[Callable[[], None]] = []

        def prepare() -> None:
            _check_layout(state_dict, own)
            kinds = _kinds(state_dict)
            loaded.update({**state_dict["shards"], **state_dict.get("unsharded", {})})
            undo.append(stepper.make_state(kinds))
            undo.append(updates.prepare_auxiliary_state(kinds))
            live.update(self._live_shards())
            unsharded.update(self._live_unsharded())
            wanted = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in unsharded.items()}
            _check_tensors(wanted | {key: ((count(each),), each.dtype) for key, each in live.items()}, loaded)
            stepper.check_scalars(state_dict["scalars"])

        refused = DeferredError()
        refused.attempt(prepare)
        failed = ranks_where(self.engine.collectives, bool(refused), "loading the optimizer's state")
        if failed:
            for each in undo:
                each()
            if isinstance(refused.error, ValueError):
                raise refused.error
            found = f"{type(refused.error).__name__}: {clause_of(refused.error)}" if refused else "others"
            raise ValueError(
                f"optimizer state: expected that of this optimizer on every rank, got {found} on ranks "
                f"{failed}. Load what state_dict returned on each."
            ) from refused.error
        stepper.load_scalars(state_dict["scalars"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for key, values in live.items():
            replace(values, loaded[key])
        for key, tensor in unsharded.items():
            tensor.copy_(loaded[key])
        self.engine.refresh_parameters()
        updates.restore()

    def _stepper(self) -> Stepper:
        stepper = self.engine.optimizer_step.stepper
        if stepper is None:
            raise zero_ext_bug("an optimizer without a stepper")
        return stepper

    def _live_shards(self) -> dict[str, Values]:
        """Return all state of this rank where it lies, by kind, parameter and first element."""
        engine = self.engine
        found = [(kind, each.name, each.start, values) for kind, _, each, values in owned_state(engine)]
        for auxiliary in engine.updates.auxiliary_state():
            layout = engine.masters[auxiliary.number].unit.layout
            found += ((auxiliary.kind, *each) for each in auxiliary.by_parameter(layout))
        return {f"{kind}/{name}/{start}": values for kind, name, start, values in found}

    def _live_unsharded(self) -> dict[str, torch.Tensor]:
        """Return all state of this rank that is not sharded, by kind and parameter."""
        return {f"{state.kind}/{state.name}": state.tensor for state in unsharded_state(self.engine)}


def original_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that :func:`zero_ext.prepare` was given for ``optimizer``, or this one itself."""
    return optimizer.optimizer if isinstance(optimizer, ZeroOptimizer) else optimizer


def _check_layout(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the state is of other ranks, another stage or other param groups."""
    if saved.get("layout") != own["layout"]:
        raise ValueError(
            f"optimizer state: expected that of {own['layout']}, got {saved.get('layout')}. "
            "Use zero_ext.save_checkpoint and zero_ext.load_checkpoint to change ranks or stage."
        )
    groups, names = ([group["params"] for group in each["param_groups"]] for each in (saved, own))
    if groups != names:
        raise ValueError(
            "optimizer state: expected the param groups and parameters of this optimizer, got "
            "others. Build the param groups as when it was saved."
        )


def _kinds(saved: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of state of each parameter. Names of parameters may have slashes."""
    pairs = [key.rpartition("/")[0].partition("/") for key in saved["shards"]]
    pairs += [key.partition("/") for key in saved.get("unsharded", {})]
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, _, name in pairs:
        kinds[name] = (*kinds.get(name, ()), kind)
    return kinds


def _check_tensors(
    live: Mapping[str, tuple[tuple[int, ...], torch.dtype]], loaded: Mapping[str, torch.Tensor]
) -> None:
    """Raise ``ValueError`` without a tensor ``loaded`` of the shape and dtype of each ``live`` one."""
    if live.keys() != loaded.keys():
        missing, surplus = sorted(live.keys() - loaded.keys()), sorted(loaded.keys() - live.keys())
        raise ValueError(
            "optimizer state: expected the entries of this optimizer, got one with entries missing "
            f"{missing[:3]}, entries that this optimizer lacks {surplus[:3]}. Load the state of "
            "this optimizer."
        )
    for key, (shape, dtype) in live.items():
        found = tuple(loaded[key].shape), loaded[key].dtype
        if found != (shape, dtype):
            raise ValueError(
                f"optimizer state '{key}': expected shape {shape} of {dtype}, got {found[0]} of {found[1]}. "
                "Load the state of this optimizer."
            )
