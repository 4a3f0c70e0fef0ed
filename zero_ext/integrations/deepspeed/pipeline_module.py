"""DeepSpeed's pipelines of layers on ``zero_ext.parallel.pipeline``: ``PipelineModule``, its layers, the
grid of its ranks, and the cuts of layers into stages."""

from __future__ import annotations

import math
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.integrations.deepspeed import deepspeed_checkpointing as checkpointing
from zero_ext.integrations.deepspeed.deepspeed_comm import add_pipeline
from zero_ext.integrations.deepspeed.deepspeed_config import check_others
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.parallel import make_mesh, pipeline, rank_mapping
from zero_ext.parallel.pipeline.layers import Layer, outline_of
from zero_ext.parallel.pipeline.stage_module import split_stages
from zero_ext.parallel.rank_grid import RankGrid

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


_LEFT_OUT = ("data", "pipe")


class PipelineError(RuntimeError):
    """A call that a pipeline does not support."""


class LayerSpec(pipeline.LayerSpec):
    """``typename(*module_args, **module_kwargs)``, built on the ranks of its stage.

    Its random values depend on torch's seed and the layer's number alone, so not on the number of stages.
    ``TypeError`` for another class than a module's.
    """

    @property
    def typename(self) -> type[nn.Module]:
        """The class of the layer."""
        return self.kind

    @property
    def module_args(self) -> tuple[Any, ...]:
        """Return what it is built from."""
        return self.arguments

    @property
    def module_kwargs(self) -> dict[str, Any]:
        """And by name."""
        return self.options


class TiedLayerSpec(LayerSpec, pipeline.TiedLayerSpec):
    """A layer that shares its parameters with all others of the same ``key``.

    ``forward_fn(module, inputs)`` is what this occurrence does; None is the layer's own forward. All
    parameters are shared, those that ``tied_weight_attr`` names and the others, as on one rank.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        /,
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(key, typename, *module_args, forward=forward_fn, **module_kwargs)
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr

    @property
    def forward_fn(self) -> Callable[[nn.Module, Any], Any] | None:
        """Return what this occurrence does in place of the layer's own forward."""
        return self.forward


class ProcessTopology:
    """A grid of ranks with named axes, counted row-major: the last axis varies fastest.

    ``axes`` are names, ``dims`` their lengths. Coordinates come as named tuples of class ``ProcessCoord``.
    ``ValueError`` for lists of different length, repeated names or lengths below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(length < 1 for length in dims):
            raise ValueError(
                f"axes: expected different names, each with a length of at least 1, got {list(axes)} of "
                f"lengths {list(dims)}. Correct them."
            )
        self.axes = list(axes)
        self.dims = list(dims)
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinate
        self._grid = RankGrid.counted(dict(zip(axes, dims, strict=True)))

    @property
    def mapping(self) -> dict[Any, int]:
        """Every coordinate's rank."""
        return {self.get_coord(rank): rank for rank in self._grid.ranks}

    def world_size(self) -> int:
        """Return number of ranks."""
        return len(self._grid.ranks)

    def get_axis_names(self) -> list[str]:
        """Return the axes in order."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Length of an axis; 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """Return the rank at a full coordinate. ``ValueError`` for a partial one or one outside the grid."""
        if set(coord) != set(self.axes):
            raise ValueError(
                f"get_rank: expected all of {self.axes}, got {sorted(coord)}. Use filter_match for fewer."
            )
        return self._grid.rank(**coord)

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank. ``ValueError`` for one outside the grid."""
        return self.ProcessCoord(**self._grid.coordinate(rank))

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = _LEFT_OUT, inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinates in a file name, like "model_01"; without ``omit_axes``."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """For each line along ``axis`` its ranks; empty for an axis that there is not."""
        return self._grid.groups(axis) if axis in self.axes else []

    def filter_match(self, **coord: int) -> list[int]:
        """Return the ranks with coordinates that agree with all that are given. ``ValueError`` for an unknown
        axis.
        """
        return self._grid.matching(**coord)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at ``idx`` of ``axis``."""
        return self.filter_match(**{axis: idx})

    def __str__(self) -> str:
        return str(self.mapping)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(axes={self.axes}, dims={self.dims}, ranks={math.prod(self.dims)})"


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallelism; ranks of one stage are neighbors."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallelism; ranks of one model-parallel group are neighbors."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


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
        add_pipeline(self, mesh)
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
            "layers that split their own tensors over ranks. Use zero_ext.parallel.make_mesh(pp=..., "
            "tp=...), zero_ext.parallel.pipeline, and parallelize_module of torch or apply_tensor_parallel."
        )
    digits = tuple((_AXES[axis], length) for axis, length in lengths.items() if axis in _AXES)
    return make_mesh(dict(digits), mapping=rank_mapping.RankMapping(("pp", "dp"), digits))


_METHODS = "'parameters', 'uniform' or 'type:' and a regular expression for names of classes"


def weights_by(method: str, layers: Sequence[Layer]) -> list[float]:
    """Return what each layer weighs under ``method``, which is read without regard to case.

    "parameters": elements that are trained. "uniform": 1. "type:REGEX": 1 for layers with a class, or
    function, has a name in which the expression is found, 0 for the others. ``ValueError`` for another method
    and where nothing is found.
    """
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return [1.0] * len(layers)
    if kind.lower() == "parameters":
        return [float(_trained(outline_of(layer))) for layer in layers]
    if kind.lower() != "type" or not pattern:
        raise ValueError(
            f"partition_method: expected {_METHODS}, got {method!r}. To cut by measured seconds, use "
            "zero_ext.parallel.pipeline.PipelineModule(..., split=profile_layers(layers, micro_batch))."
        )
    names = [_name(layer) for layer in layers]
    found = [float(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
    if not any(found):
        raise ValueError(
            f"partition_method: {method!r} matches none of the layers {sorted(set(names))}. Name one of "
            "those."
        )
    return found


def _trained(layer: nn.Module | None) -> int:
    parameters = layer.parameters() if layer is not None else ()
    return sum(each.numel() for each in parameters if each.requires_grad)


def _name(layer: Any) -> str:
    if isinstance(layer, pipeline.LayerSpec):
        return layer.kind.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of parts with sizes that differ by at most 1, larger ones first: ``num_parts`` + 1 of
    them."""
    size, larger = divmod(num_items, num_parts)
    return [index * size + min(index, larger) for index in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of parts. The heaviest is as light as can be: ``num_parts`` + 1 of them."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [0, *(index.stop for index in split_stages(weights, num_parts))]
