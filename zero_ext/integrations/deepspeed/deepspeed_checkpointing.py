"""``deepspeed.checkpointing``: activation checkpointing, by ``zero_ext.checkpoint_activations``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero_ext.activation import ActivationCheckpointing, RandomStreams, current_checkpointing
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.config.events import ActivationEnd, Event
from zero_ext.integrations.deepspeed.deepspeed_config import json_values
from zero_ext.integrations.deepspeed.deepspeed_reports import logger

_SECTION = "activation_checkpointing"
# The arguments of configure by the JSON's keys.
_NAMES = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "num_checkpoints": "number_checkpoints",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
CudaRNGStatesTracker = RandomStreams


class _Configured:
    """The state that the module's functions share. DeepSpeed has no object for it."""

    def __init__(self) -> None:
        self.streams = RandomStreams()
        self.mpu: Any = None
        self.values: dict[str, Any] = {}
        self.checkpointing: ActivationCheckpointing | None = None

    def apply(self, mpu: Any, values: Mapping[str, Any]) -> None:
        """Checkpoints as the JSON's ``values`` say from now on."""
        said = {name: value for name, value in values.items() if value not in (None, False)}
        if not said.get("contiguous_memory_optimization"):
            said.pop("number_checkpoints", None)
        policy = ActivationCheckpointingConfig(**said)
        if policy.partition_activations and mpu is None:
            raise ValueError(
                "checkpointing.configure: expected mpu_ with partition_activations=True, got None. Pass the "
                "mpu_ of the model-parallel ranks, or set partition_activations to False."
            )
        group = _of(mpu, "group") if policy.partition_activations else None
        data_parallel = mpu.get_data_parallel_group() if group is not None else None
        made = ActivationCheckpointing(policy, group, data_parallel_group=data_parallel, streams=self.streams)
        if policy.profile:
            made.bus.subscribe(_log)
        self.mpu, self.values, self.checkpointing = mpu, dict(values), made


_CONFIGURED = _Configured()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what :func:`checkpoint` does.

    ``deepspeed_config`` is DeepSpeed's JSON, its path or a ``DeepSpeedConfig``. Its section
    ``activation_checkpointing`` counts; the arguments after it override that. ``mpu_`` has
    get_tensor_model_parallel_group (or get_model_parallel_group) and get_data_parallel_group. Raises
    ``ConfigError`` for values that contradict each other, ``ValueError`` for ``partition_activations``
    without ``mpu_`` or with a group of data-parallel ranks.
    """
    arguments = dict(locals())
    json = {} if deepspeed_config is None else json_values("deepspeed_config", deepspeed_config)
    section = json.get(_SECTION) or {}
    values = {key: section.get(key) for key in _NAMES.values()}
    values |= {key: arguments[name] for name, key in _NAMES.items() if arguments[name] is not None}
    _CONFIGURED.apply(mpu_, values)


def is_configured() -> bool:
    """Return whether :func:`configure` was called."""
    return _CONFIGURED.checkpointing is not None


def reset() -> None:
    """Nothing to do: what is kept of a call goes with its graph, and buffers are used again."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change ``partition_activations`` of :func:`configure`."""
    _CONFIGURED.apply(_CONFIGURED.mpu, _CONFIGURED.values | {"partition_activations": partition_activation})


def set_num_layers(nlayers: int) -> None:
    """Change ``num_checkpoints`` of :func:`configure`."""
    _CONFIGURED.apply(_CONFIGURED.mpu, _CONFIGURED.values | {"number_checkpoints": nlayers})


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` and keep its inputs only; backward runs it again.

    Where the inputs wait says :func:`configure`; before it, the configuration of the model that runs. See
    :func:`zero_ext.checkpoint_activations`.
    """
    return (_CONFIGURED.checkpointing or current_checkpointing())(function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint


def get_cuda_rng_tracker() -> RandomStreams:
    """Return the streams of random numbers that :func:`checkpoint` restores."""
    return _CONFIGURED.streams


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default stream alike on all ranks, and "model-parallel-rng" differently on each
    model-parallel rank of :func:`configure`'s ``mpu_``."""
    _CONFIGURED.streams.seed_model_parallel(seed, _model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds "model-parallel-rng" again."""
    _CONFIGURED.streams.seed_again(seed, _model_parallel_rank())


def _model_parallel_rank() -> int:
    return 0 if _CONFIGURED.mpu is None else int(_of(_CONFIGURED.mpu, "rank"))


def _of(mpu: Any, what: str) -> Any:
    """Return the model-parallel group or rank, under the name that ``mpu`` has for it."""
    newer = getattr(mpu, f"get_tensor_model_parallel_{what}", None)
    return newer() if newer is not None else getattr(mpu, f"get_model_parallel_{what}")()


def _log(event: Event) -> None:
    if isinstance(event, ActivationEnd):
        logger.info(f"checkpointing: {event.what} {event.name} {1e3 * event.seconds:.2f} ms")
