"""The weights of a DeepSpeed universal checkpoint as a load into a prepared model reads them."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.format.tensor_files import row_major
from zero_ext.checkpoint.state_slices import DeviceStaging
from zero_ext.checkpoint.weights.weight_sources import StoredWeight, Wanted
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_fields import ModelFile, damaged, stored_tensor
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_folder import (
    PARAMETERS,
    CheckpointFiles,
    find_files,
)
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import read_pickled, verify_pickled
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_source import (
    frozen_parameters,
    frozen_values,
)
from zero_ext.integrations.deepspeed.checkpoint_io.deepspeed_weights import put_values

_FILE = "fp32.pt"


class UniversalWeights:
    """Implements ``WeightSource`` for what DeepSpeed's ``ds_to_universal`` wrote to ``folder``.

    Every parameter has a file of its own, in float32, which is mapped while it is read. Tensor parallel ranks
    are joined in it, and the padding of a vocabulary is cut off. Buffers, and the frozen parameters of
    stage 3, are in the model's files. ``CheckpointError`` says what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self._files = files = find_files(folder, universal=True)
        self._paths = {path.parent.name: path for path in sorted((folder / PARAMETERS).glob(f"*/{_FILE}"))}
        paths = files.model[:1] if files.model_by_rank else files.model
        models = [ModelFile.of(read_pickled(path), path) for path in paths]
        self._model = models[0]
        _check_run(files, self._model)
        self._buffers: dict[str, torch.Tensor] = {}
        for path, model in zip(paths, models, strict=True):
            self._add_buffers(path, model)
        self._paths = {name: path for name, path in self._paths.items() if name not in self._buffers}
        shared = {name: own for model in models for name, own in (model.shared_params or {}).items()}
        known = {*self._paths, *self._buffers, *shared}
        self._frozen = frozen_parameters(files, self._model, known) if files.model_by_rank else {}
        found = {name: self._parameter(path).to("meta") for name, path in self._paths.items()}
        found.update(
            {
                name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                for name, entry in self._frozen.items()
            }
        )
        found.update(self._buffers)
        for name, own in shared.items():
            # The converter writes a tied parameter under its other names too, rounded to the model's
            # precision. Parameters without elements are taken for tied ones.
            if own in self._paths and (name not in found or found[name].shape == found[own].shape):
                self._paths[name], found[name] = self._paths[own], found[own]
        self.tensors = {
            name: StoredWeight(tuple(value.shape), row_major(value.shape), value.dtype)
            for name, value in found.items()
        }

    def digest(self) -> str:
        """See :class:`WeightSource`."""
        paths = sorted({*self._paths.values(), *self._files.model})
        sizes = [(path.parent.name, path.name, path.stat().st_size) for path in paths]
        text = repr((self._files.path.name, sizes, sorted(self.tensors.items())))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def verify(self, wanted: Wanted, rank: int, world_size: int) -> None:
        """See :class:`WeightSource`."""
        needed = {self._paths[key] for key in wanted if key in self._paths}
        for path in sorted(needed.union(self._files.model))[rank::world_size]:
            verify_pickled(path)

    def fill(self, wanted: Wanted, staging: DeviceStaging) -> None:
        """See :class:`WeightSource`."""
        for key, slices in wanted.items():
            if key in self._buffers:
                put_values(slices, 0, self._buffers[key].reshape(-1), staging)
            elif key in self._paths and any(each.numel for each in slices):
                put_values(slices, 0, self._parameter(self._paths[key]).reshape(-1), staging)
        frozen = {key: entry for key, entry in self._frozen.items() if key in wanted}
        for rank in range(len(self._files.model)) if frozen else ():
            for key, values in frozen_values(self._files, self._model, frozen, rank).items():
                (start,) = (each.start for each in frozen[key].fragments if each.rank == rank)
                put_values(wanted[key], start, values, staging)

    def _add_buffers(self, path: Path, model: ModelFile) -> None:
        for name in model.buffer_names:
            buffer = stored_tensor(model.module, name, path)
            if not torch.equal(self._buffers.setdefault(name, buffer), buffer):
                raise CheckpointError(
                    f"{path}: {name}: expected the buffer of {self._files.model[0].name}, got other values, "
                    "which differ between tensor parallel ranks. Use DeepSpeed to export the weights."
                )

    def _parameter(self, path: Path) -> torch.Tensor:
        """Map a parameter from its file. Without tensor parallelism stage 3 has no shape there."""
        name = path.parent.name
        found = read_pickled(path, (dict, torch.Tensor))
        if isinstance(found, dict):
            return stored_tensor(found, "param", path)
        value = stored_tensor({name: found}, name, path)
        shape = next((shapes[name] for shapes in self._model.param_shapes if name in shapes), None)
        if shape is None or math.prod(shape) != value.numel():
            expected = f"expected shape {shape}, as of {self._files.model[0].name}"
            raise damaged(path, name, f"{expected}, got {value.numel()} elements")
        return value.reshape(shape)


def _check_run(files: CheckpointFiles, model: ModelFile) -> None:
    if model.configured("zero_optimization", "round_robin_gradients") is True:
        # It reads fragments at the addresses that they would have without.
        raise CheckpointError(
            f"{files.path}: expected a run without round_robin_gradients, got one with it: DeepSpeed's "
            "converter mixes its parameters up. Load the checkpoint that was converted."
        )
    if files.model_by_rank and model.dp_world_size not in (None, len(files.model)):
        raise CheckpointError(
            f"{files.path}: expected {model.dp_world_size} '*_model_states.pt' files, one per rank, got "
            f"{len(files.model)}. Copy the files of all ranks."
        )
