"""``deepspeed.pipe.PipelineModule`` on this package's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.integrations.deepspeed import checkpointing
from zero_ext.integrations.deepspeed.arguments import check_others
from zero_ext.integrations.deepspeed.pipe.layer_specs import LayerSpec, TiedLayerSpec
from zero_ext.integrations.deepspeed.pipe.partition_methods import weights_by
from zero_ext.integrations.deepspeed.process_topology import PipeDataParallelTopology, ProcessTopology
from zero_ext.integrations.deepspeed.unsupported import DeepSpeedFeatureError, names_of
from zero_ext.parallel import make_mesh, pipeline, rank_mapping

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]

_AXES = {"pipe": "pp", "data": "dp"}
_WITHOUT_EFFECT = ("base_seed", "dynamic_shape")
_SEEDED = (
    "layers of a LayerSpec are always built with seeds of their own here, from torch.manual_seed and the "
    "layer's number, and random numbers go on from there; leave it out"
)
_REFUSED = {
    "seed_layers": _SEEDED,
    "seed_fn": _SEEDED,
    "activation_checkpoint_func": "runs of layers are checkpointed by deepspeed.checkpointing.checkpoint, "
    "which deepspeed.checkpointing.configure sets up; for another one set activation_checkpoint_interval to "
    "0 and call it inside the layers",
}


class PipelineError(RuntimeError):
    """A call that a pipeline does not support."""


class PipelineModule(pipeline.PipelineModule):
    """This rank's stage of a model that is a list of layers, each called with one value, what the one before
    returned: a tensor or a tuple of tensors. A collective of all ranks.

    Args:
        layers: modules, :class:`LayerSpec`, :class:`TiedLayerSpec` or functions.
        num_stages, topology: how many stages, or how ranks stand along "pipe" and "data".
        loss_fn: called with the last layer's output and the labels of a micro-batch, a mean over its samples;
            None where the last layer returns the loss.
        partition_method: see ``weights_by`` in ``partition_methods``. The heaviest stage is as
            light as possible.
        activation_checkpoint_interval: of every so many layers of a stage, if any has parameters, keep what
            they are given alone, and run them again in backward. 0 is never.
        checkpointable_layers: names of classes; if given, runs of these alone are run again.
        options: ``base_seed`` (which there counts with ``seed_layers`` alone) and ``dynamic_shape`` (batches
            may have any shape) have no effect; ``seed_layers``, ``seed_fn`` and another
            ``activation_checkpoint_func`` than ``deepspeed.checkpointing.checkpoint`` raise.

    Parameters are named ``layers.<number>.<parameter>``; ``mesh`` is torch's mesh of the ranks.

    Raises ``ValueError`` on all ranks alike for stages that do not divide the ranks, an unknown method and
    fewer layers than stages, ``RuntimeError`` before torch.distributed runs, and
    :class:`DeepSpeedFeatureError` for other axes in a topology and options that are not served.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        checkpointable_layers: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        if options.get("activation_checkpoint_func") is checkpointing.checkpoint:
            del options["activation_checkpoint_func"]
        check_others("PipelineModule", options, _REFUSED, _WITHOUT_EFFECT)
        mesh, listed = _mesh(num_stages, topology), list(layers)
        super().__init__(listed, mesh, loss=loss_fn or _returned, split=weights_by(partition_method, listed))
        self.loss_fn, self.checkpointable_layers = loss_fn, checkpointable_layers
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.num_stages, self.stage_id = len(self.ranges), self.stages[0]
        self._topology = topology or PipeDataParallelTopology(self.num_stages, mesh["dp"].size())

    def forward(self, chunk: int, *inputs: Any, through: Callable[..., Any] | None = None) -> Any:
        """Run this rank's stage, ``chunk`` 0."""
        return super().forward(chunk, *inputs, through=through or self._through)

    def _through(self, *calls: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Return what ``calls`` make of a stage's inputs."""
        value = values[0] if len(values) == 1 else values
        length = self.activation_checkpoint_interval or len(calls)
        for start in range(0, len(calls), length):
            run = calls[start : start + length]
            if self.activation_checkpoint_interval and self._is_checkpointable(run):
                value = checkpointing.checkpoint(partial(_one_by_one, *run), value=value)
            else:
                value = _one_by_one(*run, value=value)
        return value

    def _is_checkpointable(self, run: Sequence[Callable[..., Any]]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(call).__name__ in self.checkpointable_layers for call in run)
        return any(True for call in run if isinstance(call, nn.Module) for _ in call.parameters())

    def set_checkpoint_interval(self, interval: int) -> None:
        """Change ``activation_checkpoint_interval``; ``ValueError`` for what is no number of layers."""
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise ValueError(
                f"activation_checkpoint_interval: expected a number of layers, got {interval!r}. Pass 0 "
                "for none."
            )
        self.activation_checkpoint_interval = interval

    def topology(self) -> ProcessTopology:
        """Return how ranks stand along "pipe" and "data"."""
        return self._topology

    def num_pipeline_stages(self) -> int:
        """Return how many stages there are."""
        return self.num_stages

    @property
    def parts(self) -> list[int]:
        """The number of the first layer of every stage, and behind them that of all layers."""
        return [0, *(held.stop for held in self.ranges)]

    def partitions(self) -> list[int]:
        """Return the same."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage with that layer. ``ValueError`` where there is none of that number."""
        for stage, held in enumerate(self.ranges):
            if layer_idx in held:
                return stage
        raise ValueError(
            f"layer_idx: expected 0 to {self.ranges[-1].stop - 1}, got {layer_idx!r}. Pass a layer's number."
        )


def _returned(loss: torch.Tensor, _labels: Any) -> torch.Tensor:
    return loss


def _one_by_one(*calls: Callable[..., Any], value: Any) -> Any:
    """Return what ``calls`` make of ``value``, one after another; a tuple stays one argument."""
    for call in calls:
        value = call(value)
    return value


def _mesh(num_stages: int | None, topology: ProcessTopology | None) -> DeviceMesh:
    if topology is None:
        if num_stages is None:
            raise ValueError(
                "PipelineModule: expected num_stages or topology, got neither. Pass one of them."
            )
        return make_mesh(pp=num_stages)
    lengths = dict(zip(topology.axes, topology.dims, strict=True))
    if num_stages not in (None, lengths.get("pipe")):
        raise ValueError(
            f"PipelineModule: expected num_stages {lengths.get('pipe')} as in the topology {topology!r}, got "
            f"{num_stages}. Leave one of them out."
        )
    others = [axis for axis, length in lengths.items() if axis not in _AXES and length > 1]
    if others or "pipe" not in lengths:
        raise DeepSpeedFeatureError(
            f"PipelineModule(topology={topology!r}): only the axes 'pipe' and 'data' are supported, not "
            "layers that "
            "split their own tensors over ranks. Use zero_ext.parallel.make_mesh(pp=..., tp=...), "
            "zero_ext.parallel.pipeline, and parallelize_module of torch or apply_tensor_parallel."
        )
    digits = tuple((_AXES[axis], length) for axis, length in lengths.items() if axis in _AXES)
    return make_mesh(dict(digits), mapping=rank_mapping.RankMapping(("pp", "dp"), digits))


__getattr__ = names_of("deepspeed.runtime.pipe.module")
