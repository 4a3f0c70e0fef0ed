"""Named streams of random numbers beside the default one, such as dropout that differs between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from zero_ext.activation.default_rng import DefaultGenerator

MODEL_PARALLEL = "model-parallel-rng"
# Megatron-LM's distance between the seed of data-parallel streams and that of the first model-parallel rank.
_MODEL_PARALLEL_OFFSET = 2718


class RandomStreams:
    """Named states of the default generator of ``device`` (default: the accelerator's, else the CPU's).

    Inside :meth:`fork` the default generator continues a stream; outside, nobody sees that. Checkpointed
    functions see the same numbers of every stream when they are run again.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device) if device is not None else None
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forgets all streams."""
        self._states.clear()
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """A new stream. ``ValueError`` for a name or a seed that another stream has."""
        if name in self._states:
            raise ValueError(
                f"random stream '{name}': it exists already. Call reset() before adding it again."
            )
        if seed in self._seeds:
            raise ValueError(
                f"random stream '{name}': seed {seed} belongs to another random stream. Give each stream "
                "its own."
            )
        self._seeds.add(seed)
        generator = self._generator()
        before = generator.state()
        generator.seed(seed)
        self._states[name] = generator.state()
        generator.restore(before)

    def get_states(self) -> dict[str, torch.Tensor]:
        """The streams' states, for :meth:`set_states`."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Continues all streams from ``states``."""
        self._states = dict(states)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from stream ``name``. ``KeyError`` for one that was not added."""
        if name not in self._states:
            raise KeyError(
                f"random stream '{name}': it was not added, there are {sorted(self._states)}. Add it with a "
                "seed first."
            )
        generator = self._generator()
        before = generator.state()
        generator.restore(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.state()
            generator.restore(before)

    def seed_model_parallel(self, seed: int, rank: int) -> None:
        """The default stream gets ``seed``, alike on all ranks; the only other one is ``MODEL_PARALLEL``,
        with a seed of each model-parallel ``rank``."""
        self.reset()
        torch.manual_seed(seed)
        self.add(MODEL_PARALLEL, seed + _MODEL_PARALLEL_OFFSET + rank)

    def seed_again(self, seed: int, rank: int) -> None:
        """``MODEL_PARALLEL`` starts again as after :meth:`seed_model_parallel`; the default stream goes
        on."""
        with self.fork():
            self._generator().seed(seed + _MODEL_PARALLEL_OFFSET + rank)

    def _generator(self) -> DefaultGenerator:
        if self._device is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            self._device = torch.device("cpu") if found is None else found
        return DefaultGenerator(self._device)
