"""Accelerators that give the same batches to the ranks that a sequence is sharded over."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, recursively_apply
from torch.utils.data import DataLoader, RandomSampler


class BatchSharingAccelerator(Accelerator):
    """An `Accelerator` with the same batches on neighboring ranks.

    Attributes:
        sequence_ranks: number of consecutive ranks with the same batches.
    """

    sequence_ranks: int = 1
    _drops_copies: bool = False

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a loader.

        Args:
            data_loader: of the script.
            device_placement: as in Accelerate.
            slice_fn_for_dispatch: as in Accelerate.

        Returns:
            The prepared loader.

        Raises:
            ValueError: rank 0 would read batches for all ranks (`dispatch_batches`), and sequences are
                sharded.
        """
        if self.sequence_ranks > 1:
            if self.dispatch_batches:
                raise ValueError(
                    "dispatch_batches: expected False with sequences over ranks, got True, which would give "
                    "every rank other samples. Leave it out."
                )
            self.dataloader_config.dispatch_batches = False
            if self.num_processes == self.sequence_ranks and not self.use_seedable_sampler:
                _share_order(data_loader)
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def _prepare_device_mesh(self) -> Any:
        if self.sequence_ranks == 1:
            return super()._prepare_device_mesh()
        lengths = {"dp_shard": self.num_processes // self.sequence_ranks, "cp": self.sequence_ranks}
        return _MeshLengths(tuple(lengths), lengths)

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all ranks, as in Accelerate.

        Args:
            tensor: a tensor, or tensors in lists, tuples and mappings.

        Returns:
            The same of all ranks, one after the other along the first dimension.
        """
        gathered = super().gather(tensor)
        return recursively_apply(self._one_per_batch, gathered) if self._drops_copies else gathered

    def _one_per_batch(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return what the first rank of each batch gave."""
        rows = len(gathered) // self.num_processes
        batches = self.num_processes // self.sequence_ranks
        own = gathered.view(batches, self.sequence_ranks, rows, *gathered.shape[1:])[:, 0]
        return own.reshape(-1, *gathered.shape[1:])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what the ranks computed of different samples, each sample once.

        Args:
            input_data: tensors or objects, the same on all ranks with the same batch.
            use_gather_object: as in Accelerate.

        Returns:
            The data of all samples.
        """
        if self.sequence_ranks == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            recursively_apply(lambda each: each, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            first = self.process_index % self.sequence_ranks == 0
            return super().gather_for_metrics(input_data if first else [], True)
        self._drops_copies = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._drops_copies = False


class _MeshLength(NamedTuple):
    length: int

    def size(self) -> int:
        """Return the length of the dimension."""
        return self.length


class _MeshLengths(NamedTuple):
    """Stands in for a device mesh where Accelerate reads its lengths to distribute samples."""

    mesh_dim_names: tuple[str, ...]
    lengths: dict[str, int]

    def __getitem__(self, name: Any) -> Any:
        return _MeshLength(self.lengths[name])


def share_batches(accelerator: Accelerator, sequence_ranks: int) -> None:
    """Make a built accelerator give the same batches to `sequence_ranks` consecutive ranks.

    Args:
        accelerator: has prepared no loader yet.
        sequence_ranks: a divisor of the number of ranks.
    """
    if not isinstance(accelerator, BatchSharingAccelerator):
        own = type(accelerator)
        names = {"__module__": own.__module__}
        accelerator.__class__ = type(f"BatchSharing{own.__name__}", (BatchSharingAccelerator, own), names)
    accelerator.sequence_ranks = sequence_ranks


def _share_order(loader: DataLoader[Any]) -> None:
    """Have all ranks draw the same order of samples. Accelerate does so only where ranks have different
    samples."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seeds = [int(torch.empty((), dtype=torch.int64, device="cpu").random_())]
        broadcast_object_list(seeds)
        sampler.generator = torch.Generator().manual_seed(seeds[0])
