"""The weights of a DeepSpeed checkpoint as a load into a prepared model reads them: a slice at a time."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from zero_ext.checkpoint.format.manifest import CHUNK_BYTES
from zero_ext.checkpoint.format.tensor_files import row_major
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging
from zero_ext.checkpoint.weights.weight_sources import StoredWeight, Wanted
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import read_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import verify_pickled
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_source import Fragment


class DeepSpeedWeights:
    """Implements ``WeightSource`` for what DeepSpeed wrote to ``folder``, of ZeRO stages 1 to 3.

    Trained parameters are in float32, as their optimizer had them. One rank's files are mapped at a time.
    ``CheckpointError`` says what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self._checkpoint = checkpoint = read_checkpoint(folder, verify=False)
        self._first = {name: name for name in (*checkpoint.parameters, *checkpoint.buffers)}
        for name, aliases in checkpoint.aliases.items():
            self._first.update(dict.fromkeys(aliases, name))
        stored = {name: (buffer.shape, buffer.dtype) for name, buffer in checkpoint.buffers.items()}
        for name, entry in checkpoint.parameters.items():
            stored[name] = torch.Size(entry.shape), torch.float32 if entry.group is not None else entry.dtype
        self.tensors = {
            alias: StoredWeight(tuple(stored[name][0]), row_major(stored[name][0]), stored[name][1])
            for alias, name in self._first.items()
        }

    def digest(self) -> str:
        """See :class:`WeightSource`."""
        files = self._checkpoint.files
        sizes = [(path.name, path.stat().st_size) for path in (*files.optimizer, *files.model)]
        text = repr((files.path.name, sizes, sorted(self.tensors.items())))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def verify(self, wanted: Wanted, rank: int, world_size: int) -> None:
        """See :class:`WeightSource`."""
        files = self._checkpoint.files
        for path in (*files.optimizer, *files.model)[rank::world_size]:
            verify_pickled(path)

    def fill(self, wanted: Wanted, staging: DeviceStaging) -> None:
        """See :class:`WeightSource`."""
        by_rank: dict[int, list[tuple[str, Fragment, Sequence[CheckpointSlice]]]] = defaultdict(list)
        for key, slices in wanted.items():
            name = self._first[key]
            if name in self._checkpoint.buffers:
                put_values(slices, 0, self._checkpoint.buffers[name].reshape(-1), staging)
                continue
            for fragment in self._checkpoint.parameters[name].fragments:
                if any(_overlap(each, fragment.start, fragment.numel) for each in slices):
                    by_rank[fragment.rank].append((name, fragment, slices))
        for rank, found in sorted(by_rank.items()):
            tensors = self._checkpoint.rank(rank)
            for name, fragment, slices in found:
                _, values = next(tensors.state_of(name, self._checkpoint.parameters[name], fragment))
                put_values(slices, fragment.start, values, staging)


def _overlap(target: CheckpointSlice, start: int, numel: int) -> range:
    """Return the elements of a tensor that ``target`` has among ``numel`` from ``start`` on."""
    return range(max(target.start, start), min(target.start + target.numel, start + numel))


def put_values(
    slices: Sequence[CheckpointSlice], start: int, values: torch.Tensor, staging: DeviceStaging
) -> None:
    """Fill what ``slices`` have of a tensor's elements from ``start`` on, the 1-D ``values``."""
    step = CHUNK_BYTES // values.element_size()
    for target in slices:
        common = _overlap(target, start, values.numel())
        for begin in common[::step]:
            end = min(begin + step, common.stop)
            target.put(begin - target.start, values[begin - start : end - start], staging)
