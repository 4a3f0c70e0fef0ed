"""A rank that only moves one flat buffer, in half precision or as signs; driven by a team."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness.token_bucket import slow_down
from benchmarks.harness.worker import main
from zero_ext import ops
from zero_ext.comm.onebit_all_reduce import OneBitAllReduce
from zero_ext.comm.process_group import make_collectives

COMMANDS = ("start", "half", "engine_half", "onebit", "packed_onebit")
TIMEOUT_SECONDS = 300.0


class ExchangeRank:
    """State of this process: its collectives, and the number of elements that they move."""

    def start(self, elements: int) -> None:
        """Joins the others; `elements` is made a multiple of what every rank's part needs."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.collectives = make_collectives(None, TIMEOUT_SECONDS)
        slow_down(self.collectives.traffic)
        ranks = dist.get_world_size()
        self.elements = -(-elements // (32 * ranks)) * 32 * ranks

    def half(self, repeats: int) -> list[float]:
        """Seconds of each of gloo's own all-reduces in float16."""
        flat = torch.ones(self.elements, dtype=torch.float16)
        return self._timed(repeats, lambda: dist.all_reduce(flat.zero_()))

    def engine_half(self, repeats: int) -> list[float]:
        """Seconds of each of the engine's: gradients in float16 to their owners, averages to all."""
        flat = torch.ones(self.elements, dtype=torch.float16)
        own = flat.chunk(self.collectives.world_size)[self.collectives.rank]
        received = torch.empty(flat.numel() - own.numel(), dtype=flat.dtype)

        def all_reduce() -> None:
            self.collectives.reduce_scatter(flat, own, received, False, "reduce_scatter", "halves").wait()
            self.collectives.gather(flat, own, "gather_gradients", "halves").wait()

        return self._timed(repeats, all_reduce)

    def onebit(self, repeats: int) -> list[float]:
        """Seconds of each exchange of messages of signs, to their owners and back to all, without packing."""
        ranks = self.collectives.world_size
        sends = torch.zeros(ranks * ops.sign_payload_bytes(self.elements // ranks), dtype=torch.uint8)
        receives = torch.empty_like(sends)

        def exchange() -> None:
            self.collectives.exchange_payloads(
                receives.chunk(ranks), sends.chunk(ranks), "onebit_reduce_scatter", self.elements, "signs"
            ).wait()
            self.collectives.gather_payloads(
                sends.chunk(ranks), "onebit_all_gather", self.elements, "signs"
            ).wait()

        return self._timed(repeats, exchange)

    def packed_onebit(self, repeats: int) -> list[float]:
        """Seconds of each compressed all-reduce of float32 values, packing and both errors included."""
        ranks = self.collectives.world_size
        device = torch.device("cpu")
        exchange = OneBitAllReduce(self.collectives, self.elements, device, "a buffer")
        values, errors = torch.randn(self.elements), torch.zeros(self.elements)
        server_error = torch.zeros(self.elements // ranks)

        def all_reduce() -> None:
            exchange.scatter(values, errors, 1.0)
            ops.reduce_1bit_(exchange.own, server_error, exchange.scattered(), 1.0 / ranks)
            exchange.gather()
            ops.decompress_1bit_(values, exchange.gathered(), 1.0, False, ranks)

        return self._timed(repeats, all_reduce)

    def _timed(self, repeats: int, action: Callable[[], object]) -> list[float]:
        seconds = []
        for _ in range(repeats + 1):
            dist.barrier()
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]  # connections and pages are warm


if __name__ == "__main__":
    main(ExchangeRank(), COMMANDS)
