"""Optimizer state out of device memory between phases, while something else needs the memory."""

from __future__ import annotations

import torch
from torch import nn

from zero_ext.config.config_errors import show
from zero_ext.offload import MemoryState, asleep_error
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.engine_state import owned_state, unsharded_state
from zero_ext.zero.engine import Engine


def sleep(model: nn.Module, what: str = "optimizer", tier: str = "host") -> int:
    """Move the optimizer state that a rank has in device memory to its host, until [`wake`][zero_ext.wake].

    Forward, backward and generation go on. What reads or changes the state raises `RuntimeError` meanwhile:
    steps, checkpoints, edits of parameters. Whoever captured steps as a CUDA graph captures them again after
    `wake`. fp32 parameters that are their own master weights stay.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned, on an accelerator.
        what: "optimizer", the only kind of state that moves: master weights and moments.
        tier: "host", pinned memory that is allocated here and freed by `wake`.

    Returns:
        Bytes of device memory that are free now. 0 if the state is in another tier already.

    Raises:
        ValueError: another `what` or `tier`, a model on the CPU, or updates that run during backward or
            after the step.
        RuntimeError: the state sleeps already, or the host lacks the memory; nothing has changed then.
    """
    engine = engine_of(model)
    _check(engine, what, tier)
    device = engine.tiers.device
    engine.optimizer_step.wait()
    parameters = {unit.flat.untyped_storage()._cdata for unit in engine.units}
    for unit in engine.units:
        memory = unit.storage.memory("device") if unit.placement.params else None
        if memory is not None:
            parameters.add(memory.untyped_storage()._cdata)
    # Steppers may hold state of their own, and moments in 8 bits are no tensors there.
    values = [found for _, _, _, found in owned_state(engine) if isinstance(found, torch.Tensor)]
    values += [state.tensor for state in unsharded_state(engine)]
    for master in engine.masters:
        values += master.state.values.values() if isinstance(master.state, MemoryState) else ()
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage()
        for each in values
        if each.device == device.device and each.untyped_storage()._cdata not in parameters
    }
    copies = []
    for storage in storages.values():
        copies.append((storage, device.allocate("host", storage.nbytes(), torch.uint8)))
    for storage, copy in copies:
        device.copy(copy, _bytes_of(storage)).wait()
    device.synchronize()
    for storage, _ in copies:
        storage.resize_(0)
    engine.asleep = copies
    torch.get_device_module(device.device).empty_cache()
    return sum(copy.nbytes for _, copy in copies)


def wake(model: nn.Module) -> None:
    """Move the state that [`sleep`][zero_ext.sleep] moved back, bit for bit. It does nothing if all is awake.

    Args:
        model: as for `sleep`.

    Raises:
        RuntimeError: the device lacks the memory. The state sleeps on then.
    """
    engine = engine_of(model)
    device = engine.tiers.device
    try:
        for storage, copy in engine.asleep:
            storage.resize_(copy.nbytes)
    except RuntimeError:
        for storage, _ in engine.asleep:
            storage.resize_(0)
        raise
    for storage, copy in engine.asleep:
        device.copy(_bytes_of(storage), copy).wait()
    device.synchronize()
    engine.asleep = []


def _check(engine: Engine, what: str, tier: str) -> None:
    if what != "optimizer":
        raise ValueError(f"sleep: what: expected 'optimizer', got {show(what)}. Leave it out.")
    if tier != "host":
        raise ValueError(f"sleep: tier: expected 'host', got {show(tier)}. Leave it out.")
    if not engine.tiers.device.is_accelerator:
        raise ValueError(
            "sleep: expected a model on an accelerator, got one on the CPU, where no memory would be free. "
            "Leave the call out."
        )
    mode = engine.config.offload.update_mode
    if mode != "after_backward":
        raise ValueError(
            f"sleep: offload.update_mode: expected 'after_backward', got {mode!r}, where updates run during "
            "forward and backward. Change it."
        )
    if engine.asleep:
        raise asleep_error("sleep")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
