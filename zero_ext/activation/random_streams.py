"""Named streams of random numbers besides the default one, such as dropout that differs between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch


class DefaultGenerator:
    """The generator that random ops on ``device`` use where none is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state(self) -> torch.Tensor:
        """Return a copy of the state, bytes in host memory."""
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def restore(self, state: torch.Tensor) -> None:
        """Go on from :meth:`state`."""
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def seed(self, seed: int) -> None:
        """Begin anew; generators of other devices stay as they are."""
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            with torch.accelerator.device_index(self.device.index):
                torch.get_device_module(self.device).manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed that the state began from."""
        if self.device.type == "cpu":
            return torch.default_generator.initial_seed()
        with torch.accelerator.device_index(self.device.index):
            return int(torch.get_device_module(self.device).initial_seed())


MODEL_PARALLEL = "model-parallel-rng"
"""Name of the stream that differs between model-parallel ranks."""
# Megatron-LM's distance between the seed of data-parallel streams and that of the first model-parallel rank.
_MODEL_PARALLEL_OFFSET = 2718


class RandomStreams:
    """Named states of a default generator.

    Inside `fork` the default generator continues a stream. Outside, its own state is as it was. Checkpointed
    functions see the same numbers of every stream when they are run again.

    Args:
        device: of the default generator; by default the accelerator, else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device) if device is not None else None
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Remove all streams."""
        self._states.clear()
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Args:
            name: of the stream.
            seed: of its first state.

        Raises:
            ValueError: another stream has the name or the seed.
        """
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
        """Return the streams' states, for `set_states`.

        Returns:
            States by name.
        """
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Continue from `states`, which replace all streams.

        Args:
            states: what `get_states` returned.
        """
        self._states = dict(states)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from stream `name` inside.

        Args:
            name: of a stream that was added.

        Yields:
            Nothing.

        Raises:
            KeyError: no such stream was added.
        """
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
        """Seed the default stream and the stream "model-parallel-rng", which becomes the only other one.

        Args:
            seed: of the default stream, the same on all ranks.
            rank: model-parallel rank, from which the other seed is made.
        """
        self.reset()
        torch.manual_seed(seed)
        self.add(MODEL_PARALLEL, seed + _MODEL_PARALLEL_OFFSET + rank)

    def seed_again(self, seed: int, rank: int) -> None:
        """Restart the stream "model-parallel-rng" as after `seed_model_parallel`; the default stream goes on.

        Args:
            seed: as given to `seed_model_parallel`.
            rank: as given to `seed_model_parallel`.
        """
        with self.fork():
            self._generator().seed(seed + _MODEL_PARALLEL_OFFSET + rank)

    def _generator(self) -> DefaultGenerator:
        if self._device is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            self._device = torch.device("cpu") if found is None else found
        return DefaultGenerator(self._device)
