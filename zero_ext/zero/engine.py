"""The engine of one model: units, gradients and the step, whatever the stage."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_ext.activation import ActivationCheckpointing
from zero_ext.comm import Collectives, TrafficStats
from zero_ext.config import Tier, ZeroConfig
from zero_ext.config.events import Subscriber
from zero_ext.config.tiers import is_stored
from zero_ext.offload import TierManager, asleep_error
from zero_ext.zero.construction.grouping import OwnedParameter, uses_up_gradients
from zero_ext.zero.construction.model_checks import check_unchanged
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_collector import GradientCollector
from zero_ext.zero.gradients.gradient_norms import GradientNorms
from zero_ext.zero.gradients.gradient_storage import GradientGeneration
from zero_ext.zero.gradients.param_grad import GradientViews
from zero_ext.zero.gradients.reducer import GradientReducer
from zero_ext.zero.gradients.shared_param_grads import TiedGradients
from zero_ext.zero.memory.lifetime import Ending, weakly
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.step.memory_breakdown import KINDS, memory_by_tier
from zero_ext.zero.step.optimizer_step import OptimizerStep
from zero_ext.zero.step.stepped_experts import SteppedExperts
from zero_ext.zero.step.update_schedule import UpdateSchedule
from zero_ext.zero.tiling import FullTensorMap
from zero_ext.zero.units.collective_errors import CollectiveError
from zero_ext.zero.units.master_weights import MasterShard, follow_writes, write_all_params
from zero_ext.zero.units.rank_groups import abort_model_parallel_on_error
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.backward_pass import BackwardPass, in_backward
from zero_ext.zero.unshard.forward_hooks import ForwardHooks
from zero_ext.zero.unshard.on_demand import OnDemandAccess
from zero_ext.zero.unshard.prefetcher import Prefetcher
from zero_ext.zero.unshard.step_clock import StepClock


class Engine(Ending):
    """Hold a model's sharded state and move it through forward, backward and step.

    [`prepare`][zero_ext.prepare] makes it, and [`engine_of`][zero_ext.zero.engine_of] finds it. It holds the
    model weakly: the model owns the engine.

    Args:
        model: the user's module.
        owned: its parameters with their names and modules.
        units: the parameters that are gathered together, with their master weights if they are trained.
        config: the configuration in force.
        collectives: the collectives of the data-parallel ranks.
        pool: buffers of gathered units on the device.
        gradient_staging: buffers for gradients on their way to another tier.
        tiers: device, host memory and NVMe.
        checkpointing: what `checkpoint_activations` does inside the model's forward.

    Attributes:
        config: as given.
        checkpointing: as given.
        collectives: as given.
        units: every unit of the model.
        masters: the master weights of the units that are trained.
        names: all names of each parameter.
        wrappers: the wrappers that act for the engine.
        asleep: memory of optimizer state that was moved away, and its content.
    """

    asleep: list[tuple[torch.UntypedStorage, torch.Tensor]]

    def __init__(
        self,
        model: nn.Module,
        owned: Sequence[OwnedParameter],
        units: Sequence[tuple[Unit, MasterShard | None]],
        config: ZeroConfig,
        collectives: Collectives,
        pool: BufferPool,
        gradient_staging: BufferPool,
        tiers: TierManager,
        checkpointing: ActivationCheckpointing,
    ) -> None:
        self.config, self.checkpointing, self.collectives = config, checkpointing, collectives
        self.pool, self.gradient_staging, self.tiers = pool, gradient_staging, tiers
        self.names = {item.parameter: item.names for item in owned}
        self._assignments = [
            (item.parameter, name, weakref.ref(owner))
            for item in owned
            for name, owner in zip(item.names, item.owners, strict=True)
        ]
        self.full_tensors = FullTensorMap(model)
        self.units = tuple(unit for unit, _ in units)
        self.masters = tuple(master for _, master in units if master is not None)
        self._model, self._began = weakref.ref(model), time.perf_counter()
        self._bus, self._clock = collectives.bus, StepClock(collectives.bus, tiers.device)
        used_up = uses_up_gradients(config, (unit.layout.dtype for unit in self.units))
        self._generation, experts = GradientGeneration(), SteppedExperts.of(model, owned, config)
        settings = (pool, gradient_staging, tiers, config, collectives, used_up, self._generation)
        self._gradients = {master.unit: UnitGradients(master.unit, *settings) for master in self.masters}
        trained = list(self._gradients.values())
        uncounted = {item.parameter for item in owned if not item.counted}
        self.norms = GradientNorms(trained, collectives, tiers.device, self._generation, uncounted)
        self._tied = TiedGradients(trained, collectives.model, self._generation)
        scales_loss = any(unit.layout.dtype is torch.float16 for unit in self.units)
        self.optimizer_step = OptimizerStep(
            self.masters, self._gradients, self.norms, collectives, tiers, config, scales_loss, experts
        )
        context = (collectives, tiers.device.reduction_stream, self._bus)
        self.reducer = GradientReducer(trained, *context, self.optimizer_step, self._generation)
        self.access = OnDemandAccess(self)
        self.prefetcher = Prefetcher(self.units, config.units, self._bus, weakly(self.access.commit))
        events = map(weakly, (self._begin_backward, self._end_backward, self._abandon_backward))
        passed, check = weakly(self._passed), weakly(self._check_parameters)
        self.backward_pass = BackwardPass(self.prefetcher, self._clock, experts.add, passed, *events)
        self.hooks = ForwardHooks(self.prefetcher, self.backward_pass, check, self._clock, checkpointing)
        self.index = {
            parameter: (unit, number)
            for unit in self.units
            for number, parameter in enumerate(unit.parameters)
        }
        # Factors of clipping by calls wait for the step, unless it has a norm or other stages other factors.
        shown = config.gradient_clipping or scales_loss or collectives.model is not None
        defers = not shown and config.offload.update_mode != "in_backward"
        updates = partial(getattr, self.optimizer_step, "updates")
        self.views = GradientViews(self.reducer, self.norms, collectives, updates, defers, experts.forget)
        moved = (self.index, self._gradients, self.reducer, self._generation, self.backward_pass, updates)
        self.collector = GradientCollector(*moved, config.batch.gradient_accumulation_steps, scales_loss)
        self.wrappers, self.asleep = weakref.WeakSet[nn.Module](), []
        # Before a model's memory goes along with it, nothing may be under way there.
        weakref.finalize(self, tiers.device.synchronize).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the engine out of a copy: a copied model is an ordinary module."""

    # -- facts --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank within the engine's group."""
        return self.collectives.rank

    @property
    def device(self) -> torch.device:
        """The device that the model trains on. Its memory is the tier "device"."""
        return self.tiers.device.device

    @property
    def in_use(self) -> bool:
        """Return whether the model is inside a forward or a backward pass."""
        return bool(self.hooks.calls) or self.backward_pass.running

    @property
    def world_size(self) -> int:
        """Number of ranks N that share the state."""
        return self.collectives.world_size

    @property
    def model(self) -> nn.Module:
        """The user's module; raises `RuntimeError` once it was deleted.

        Raises:
            RuntimeError: the model was deleted.
        """
        if (model := self._model()) is None:
            raise RuntimeError(
                "engine: expected its model to exist, got a deleted one. Keep a reference to the "
                "model while training."
            )
        return model

    @property
    def steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.optimizer_step.steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far because fp16 gradients overflowed."""
        return self.optimizer_step.skipped_steps

    @property
    def updates(self) -> UpdateSchedule:
        """The schedule of the optimizer's updates."""
        return self.optimizer_step.updates

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step before clipping; None if nothing asked for it.

        The host waits for a device that has not computed it yet.
        """
        return self.optimizer_step.grad_norm

    @property
    def traffic(self) -> TrafficStats:
        """Elements and bytes sent by the collectives of this step and of the last one."""
        return self.collectives.traffic

    def memory_breakdown(self) -> dict[str, int]:
        """Return the bytes of device and host memory that this rank holds now.

        Returns:
            Bytes by kind of state.
        """
        in_memory = [held for tier, held in self.memory_by_tier().items() if not is_stored(tier)]
        return {kind: sum(held[kind] for held in in_memory) for kind in KINDS}

    def memory_by_tier(self, wait: bool = True) -> dict[Tier, dict[str, int]]:
        """Return the bytes that this rank holds now.

        Args:
            wait: wait for a delayed update. Without it none may be running: its state may be about to change.

        Returns:
            Bytes by tier and kind of state.
        """
        if wait:
            self.optimizer_step.wait()
        held = memory_by_tier(
            self.units,
            self.masters,
            self.reducer.gradients,
            self.optimizer_step,
            self.collectives,
            self.tiers,
            {"device": self.pool, "host": self.gradient_staging},
        )
        moved = sum(copy.nbytes for _, copy in self.asleep)
        held["device"]["optimizer"] -= moved
        held["host"]["optimizer"] += moved
        return held

    def gradients_of(self, unit: Unit) -> UnitGradients:
        """Return the gradient buffers of `unit`.

        Args:
            unit: one that is trained.

        Returns:
            Its buffers.
        """
        return self._gradients[unit]

    @property
    def subscribers(self) -> tuple[Subscriber, ...]:
        """The subscribers of the engine's events."""
        return self._bus.subscribers

    def subscribe(self, subscriber: Subscriber) -> None:
        """Publish the engine's events to `subscriber` from now on.

        Args:
            subscriber: called with each event.
        """
        self._bus.subscribe(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Publish no more events to `subscriber`.

        Args:
            subscriber: as given to `subscribe`.
        """
        self._bus.unsubscribe(subscriber)

    def _refuse_capture(self, what: str, why: str) -> None:
        if self.tiers.device.captures:
            raise RuntimeError(
                f"{what}: expected no capture of a graph, as {why} and a replay runs none of it. "
                "Capture blocks, in stages 0 to 2, where parameters stay in place: "
                "torch.cuda.make_graphed_callables(block, ...) after zero_ext.prepare, or "
                "torch.compile(block, mode='reduce-overhead') before it."
            )

    def _check_parameters(self) -> None:
        if torch.is_grad_enabled() or any(unit.placement.params for unit in self.units):
            self._refuse_capture("a forward", "Python gathers parameters and reduces gradients")
        self.optimizer_step.refuse_damage()
        self.updates.refuse_pending("a forward")
        check_unchanged(self.model, self._assignments, self.names)
        for unit in self.units:
            if not unit.placement.params:
                unit.check_unmoved()

    # -- backward -----------------------------------------------------------------------------------------

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the loss scale, on which to call `backward`.

        Args:
            loss: 0-d, as computed.

        Returns:
            The scaled loss in float32 if parameters are fp16, else `loss` itself.
        """
        self.collector.loss_scaled = True
        self._clock.see(loss)
        step = self.optimizer_step
        return loss.float() * step.scaler.scale if step.scales_loss else loss

    def parameter_read(self, parameter: nn.Parameter) -> None:
        """Note that the model's own code reads a parameter, in forward or in a recomputation.

        Args:
            parameter: of this model.
        """
        if in_backward() and parameter in self.index:
            unit, number = self.index[parameter]
            if unit in self._gradients:
                self.updates.read(self._gradients[unit], number)

    def _begin_backward(self) -> None:
        self._refuse_capture("a backward", "Python gathers parameters and reduces gradients")
        self.optimizer_step.begin_backward(self.collector.ends_accumulation)
        self.views.factors.apply_all()
        self.views.follow()
        self.collector.begin_pass(self.prefetcher.expects_gathers)

    def _passed(self, unit: Unit) -> None:
        self.collector.passed(unit)

    def _end_backward(self) -> None:
        try:
            self.collector.end_pass()
        finally:
            self.views.publish()

    def _abandon_backward(self) -> None:
        self.optimizer_step.abandon()
        self.collector.abandon_pass()
        self.clear_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their true global norm is at most `max_norm`; a collective.

        Args:
            max_norm: the largest norm allowed.
            norm_type: 2 or infinity.

        Returns:
            The norm before clipping, 0-d float32 on the training device, without the loss scale.
        """
        self.updates.refuse_pending("clip_grad_norm_")
        self.updates.refuse_local("clip_grad_norm_")
        self.synchronize_gradients()
        step = self.optimizer_step
        unscale = 1.0 / step.scaler.scale if step.scales_loss else 1.0
        return self.views.clip_norm(max_norm, norm_type, unscale).to(self.device, torch.float32)

    def refresh_parameters(self) -> None:
        """Make the parameters follow master weights that changed from outside, on all ranks; a collective."""
        self.prefetcher.forget_values()
        write_all_params(self.masters, self.units, self.collectives)

    # -- step ---------------------------------------------------------------------------------------------

    def synchronize_gradients(self) -> None:
        """Complete the reduced gradients on every rank; a collective.

        Raises:
            RuntimeError: the next step leaves gradients unreduced, as one-bit optimizers do.
        """
        self.updates.refuse_local("reading or changing averaged gradients")
        self._synchronize_gradients()

    def _synchronize_gradients(self) -> None:
        self.views.follow()
        if not self.reducer.synchronized:
            self.reducer.synchronize(not self.updates.needs_local_gradients)
        self._tied.sum_()
        self._generation.writes += 1  # users may have written to full gradients directly
        self.views.publish()

    def clear_gradients(self) -> None:
        """Clear all gradients, as `optimizer.zero_grad()` does."""
        if not in_backward():
            self.backward_pass.abandon()
        self.optimizer_step.forget_gradients()
        if not in_backward():
            self.prefetcher.release_retained()
        self.views.forget()
        self.collector.clear()

    def step(self) -> bool:
        """Make one optimizer step on all ranks; a collective.

        Returns:
            False if fp16 gradients overflowed and the step was skipped.

        Raises:
            RuntimeError: no gradient arrived on any rank since the last step, or this is inside backward.
        """
        self._refuse_capture("optimizer.step()", "the host counts steps, looks at norms and sends parameters")
        began = self._clock.begin()
        self._refuse_early_step()
        self.prefetcher.forget_values()  # what was fetched ahead has the values before the update
        with abort_model_parallel_on_error(self.collectives):
            self._synchronize_gradients()
            self.optimizer_step.factor = self.views.factors.common(self.reducer.gradients)
            stepped = self.optimizer_step.run(self.reducer.edits)
        if stepped and not self.updates.in_progress:
            for gradients in self.reducer.gradients:
                gradients.unit.forbid_saved(gradients.contributed)
        self.collector.end_accumulation()
        if self.updates.clears:
            self.clear_gradients()
        self._clock.end("step", began)
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        loss = self._clock.end_step(self.steps, self.optimizer_step.late_norm)
        if self._bus:
            self._bus.publish(self.optimizer_step.end(not stepped, loss, seconds))
        # The thread starts last because it changes state that subscribers of the step's end read.
        self.updates.begin_delayed()
        return stepped

    def _refuse_early_step(self) -> None:
        self.optimizer_step.refuse_damage()
        if self.hooks.paused:
            raise RuntimeError(
                "optimizer.step(): expected a call outside 'with zero_ext.unsharded_for_generation(...)', as "
                "parameters stay the old ones there, got one inside. Leave the block first."
            )
        if self.asleep:
            raise asleep_error("optimizer.step()")
        if self.backward_pass.running:
            raise RuntimeError(
                "optimizer.step(): expected no backward pass around it, got one. Call it after "
                "loss.backward() has returned."
                if in_backward()
                else "optimizer.step(): expected complete gradients, got those of a backward pass that "
                "raised. Call optimizer.zero_grad() and start a new forward."
            )
        for unit in self.units:
            if not unit.placement.params and unit.written():
                self.updates.refuse_pending(f"a write to parameters of {unit.describe()}")
        self._follow_writes(self.collectives)

    def follow_writes(self) -> None:
        """Copy what users wrote to parameters into the master weights, before these are read.

        Raises:
            RuntimeError: between updates in backward and their step.
        """
        self.updates.refuse_pending("reading the state")
        self._follow_writes()

    def _follow_writes(self, collectives: Collectives | None = None) -> None:
        written = [unit for unit in self.units if not unit.placement.params and unit.written()]
        if written:
            self.updates.refuse_drift(f"a write to parameters of {written[0].describe()}")
            if self.updates.in_progress:
                name = written[0].layout.specs[written[0].written()[0]].name
                raise RuntimeError(
                    f"parameter '{name}': expected no write while a delayed update is under way "
                    "(offload.update_mode is 'delayed'), which would undo it, got one. Write inside "
                    "'with zero_ext.gathered(params, modifier_rank=0):', or call model.finish_update() "
                    "first. Load a checkpoint to go on."
                )
        follow_writes(self.masters, collectives)

    def finish_updates(self, replaced: bool = False) -> None:
        """Make the parameters follow a delayed update; a collective.

        Called before state is read or written from outside.

        Args:
            replaced: all state is about to be replaced, so a damaged model and one in use raise nothing.

        Raises:
            RuntimeError: the model is damaged, or it is in use while such an update is under way.
        """
        step = self.optimizer_step
        if not replaced:
            step.refuse_damage()
            if not self.in_use:
                step.judge()
        if not step.updates.in_progress:
            return
        if not replaced:
            if self.in_use or any(unit.holders for unit in self.units):
                raise RuntimeError(
                    "state: expected a read or write between steps, as a delayed update is under way "
                    "(offload.update_mode is 'delayed'), got one inside forward, backward or 'with "
                    "zero_ext.gathered(...)'. Do it between steps, or call model.finish_update() before. "
                    "After a backward pass that raised, call optimizer.zero_grad() first."
                )
            self._follow_writes()
        self.prefetcher.forget_values()  # what was fetched ahead has the values before the update
        # A failed update does not matter to state that is about to be replaced.
        with contextlib.suppress(*([CollectiveError] if replaced else [])):
            step.finish()
