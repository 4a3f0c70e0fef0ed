"""Random numbers of a model with split tensors: a rank's own where tensors are split, the same elsewhere."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from zero_ext.activation.random_streams import DefaultGenerator
from zero_ext.parallel.tensor.tp_styles import InputsParallel, MultiQueryOutputs, OutputsParallel

# Training forwards with random numbers between two looks at whether the ranks draw the same.
LOOKS_EVERY = 16


def split_randomness(model: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    """Has dropout and other random ops of ``model`` in training draw numbers of a rank's own from a module
    with outputs split by ``styles`` to the next one with split inputs, as Megatron-LM's two streams do
    (Shoeybi et al., arXiv 1909.08053, appendix B.2); everywhere else the default generator goes on, alike
    on all ranks of ``mesh``.

    A rank's own numbers follow from the default generator's state and the rank: what restores the default
    generator, such as a checkpoint of activations or a resumed run, restores them.

    A forward that draws random numbers raises ``RuntimeError`` on all ranks of ``mesh`` if their default
    generators differ before it; the first and every 16th looks at that.
    """
    region = _SplitRegion(mesh)
    for name, style in styles.items():
        if _splits_outputs(style):
            model.get_submodule(name).register_forward_hook(region.after_outputs)
        elif _has_split_inputs(style):
            model.get_submodule(name).register_forward_pre_hook(region.before_inputs, prepend=True)
    model.register_forward_pre_hook(region.before_model, prepend=True)
    model.register_forward_hook(region.after_model, always_call=True)


def _splits_outputs(style: ParallelStyle) -> bool:
    if isinstance(style, ColwiseParallel):
        return style.use_local_output and all(isinstance(each, Shard) for each in style.output_layouts)
    return isinstance(style, OutputsParallel | MultiQueryOutputs)


def _has_split_inputs(style: ParallelStyle) -> bool:
    if isinstance(style, RowwiseParallel):
        return all(isinstance(each, Shard) for each in style.input_layouts)
    return isinstance(style, InputsParallel)


class _SplitRegion:
    """The state of a default generator: whether it gives this rank's own numbers, and both its states."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._rank = mesh, mesh.get_local_rank()
        self._generator = DefaultGenerator(torch.device("cpu"))
        self._seed: int | None = None
        self._outside = self._begun = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._before: tuple[DefaultGenerator, torch.Tensor] | None = None  # of the model's forward
        self._forwards = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _SplitRegion:
        return self  # the hooks of a copied model are in the same group of ranks

    def enter(self, device: torch.device) -> None:
        """Let the default generator of ``device`` give this rank's own numbers, unless it does already."""
        if self._is_inside():
            return
        self._generator = DefaultGenerator(device)
        self._outside = self._generator.state()
        self._seed = _digest(self._outside, self._rank)
        self._generator.seed(self._seed)
        self._begun = self._generator.state()

    def leave(self) -> None:
        """Let the default generator go on where it was, a number further if some were drawn inside."""
        if not self._is_inside():
            return
        drew = not torch.equal(self._begun, self._generator.state())
        self._generator.restore(self._outside)
        if drew:
            torch.rand((), device=self._generator.device)

    def _is_inside(self) -> bool:
        # Read from the generator: a recomputation that stops early restores its state and calls nothing here.
        return self._seed is not None and self._generator.initial_seed() == self._seed

    @torch._dynamo.disable
    def after_outputs(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """Enter behind a module with split outputs."""
        if module.training and output.device.type != "meta":
            self.enter(output.device)

    @torch._dynamo.disable
    def before_inputs(self, module: nn.Module, inputs: Any) -> None:
        """Leave before a module with split inputs."""
        self.leave()

    @torch._dynamo.disable
    def before_model(self, module: nn.Module, inputs: Any) -> None:
        """End a region that an exception left open, and note the state."""
        self.leave()
        self._before = None
        parameter = next(module.parameters(), None)
        if module.training and parameter is not None and parameter.device.type != "meta":
            generator = DefaultGenerator(parameter.device)
            self._before = generator, generator.state()

    @torch._dynamo.disable
    def after_model(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End a region that is open, and look whether the ranks drew the same."""
        self.leave()
        before, self._before = self._before, None
        if output is not None and before is not None:
            self._look(*before)

    def _look(self, generator: DefaultGenerator, state: torch.Tensor) -> None:
        if torch.equal(state, generator.state()):
            return
        self._forwards += 1
        if self._forwards % LOOKS_EVERY != 1:
            return
        own = _digest(state, 0)
        ends = torch.tensor([own, -own], dtype=torch.int64, device=generator.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._mesh.get_group())
        largest, smallest = ends.tolist()
        if largest != -smallest:
            raise RuntimeError(
                "default random generators: expected the same state on the ranks that tensors are split "
                "over, got states that differ, so dropout outside of the split parts would too, and with it "
                'the weights that all of these ranks have. Give the ranks along "tp" one seed, as '
                'torch.manual_seed(seed + mesh["dp"].get_local_rank()), and draw random numbers on all of '
                "them alike."
            )


def _digest(state: torch.Tensor, rank: int) -> int:
    """Return a seed, 63 bits."""
    found = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, salt=rank.to_bytes(8, "little"))
    return int.from_bytes(found.digest(), "little") >> 1
