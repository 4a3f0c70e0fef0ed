"""Tensor-parallel ranks store 1/N of shared inputs each; what they cannot share is refused."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import nn

import zero_ext
from tests.activation.blocks import Counting, noted_records, same
from tests.activation.tensor_parallel import WIDTH, InplaceAllReduce, slopes, stack
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.activation import ActivationCheckpointing, DifferentInputsError
from zero_ext.activation.offloader import ActivationRecord, RecordState
from zero_ext.activation.packed_layout import PackedLayout
from zero_ext.activation.partitioned_activations import ActivationPartition
from zero_ext.config import ActivationCheckpointingConfig


@contextlib.contextmanager
def policies() -> Iterator[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield [
            {},
            {"tier": "host"},
            {"tier": "nvme", "nvme_paths": (folder,), "buffer_bytes": 2**20},
            {"contiguous_memory_optimization": True, "number_checkpoints": 4},
        ]


@on_ranks(2, 3, by_turns=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_tensor_parallel_stack(world: World, dtype: str) -> None:
    blocks, streams = stack(world, getattr(torch, dtype))
    wanted = slopes(world, blocks, streams, None)
    with policies() as wanted_policies:
        for values in wanted_policies:
            policy = ActivationCheckpointingConfig(partition_activations=True, **values)
            checkpointing = ActivationCheckpointing(policy, world.group, streams=streams)
            for _ in range(2):
                assert same(slopes(world, blocks, streams, checkpointing), wanted)
            gc.collect()
            assert checkpointing.used_bytes() == 0


@on_ranks(2, 4)
def test_each_rank_stores_its_shard(world: World) -> None:
    for tier in ("device", "host"):
        policy = ActivationCheckpointingConfig(partition_activations=True, tier=tier)
        checkpointing = ActivationCheckpointing(policy, world.group)
        torch.manual_seed(world.seed)
        hidden = torch.randn(256, WIDTH, requires_grad=True) * 1
        nbytes, out = hidden.nbytes, hidden
        for calls in range(1, 4):
            out = checkpointing(torch.sin, out)
            assert checkpointing.used_bytes() == calls * nbytes // world.size
        out.sum().backward()
        del out
        assert checkpointing.used_bytes() == 0


@on_ranks(2)
def test_only_the_ranks_own_shard_is_prefetched(world: World) -> None:
    """Which calls live ahead is a matter of each rank's garbage collector: nobody waits for another one
    there."""
    gather = ActivationPartition.gather
    for values in ({"tier": "host"}, {"tier": "host", "prefetch": 3}, {"prefetch": 2}):
        checkpointing = ActivationCheckpointing(
            ActivationCheckpointingConfig(partition_activations=True, **values), world.group
        )
        torch.manual_seed(world.seed)
        source = torch.randn(64, WIDTH, requires_grad=True)
        records: list[ActivationRecord] = []
        with noted_records(records):
            out = checkpointing(torch.sin, checkpointing(torch.sin, source * 1))
            dead = checkpointing(torch.sin, source * 2)
            out = checkpointing(torch.sin, checkpointing(torch.sin, out))
        if world.rank == 0:
            del dead, records[2]
        assert [record.state for record in records] == [RecordState.OFFLOADED] * (4 + world.rank)
        seen: list[tuple[int, int]] = []

        def noted(
            partition: ActivationPartition,
            shard: torch.Tensor,
            layout: PackedLayout,
            records: list[ActivationRecord] = records,
            seen: list[tuple[int, int]] = seen,
        ) -> torch.Tensor:
            fetching = [record.shard.nbytes for record in records if record.state is RecordState.FETCHING]
            seen.append((len(fetching), sum(fetching)))
            return gather(partition, shard, layout)

        with mock.patch.object(ActivationPartition, "gather", noted):
            (slope,) = torch.autograd.grad(out.sum(), source)
        wanted = torch.autograd.grad(source.sin().sin().sin().sin().sum(), source)[0]
        assert torch.equal(slope, wanted)
        calls = 1 + values.get("prefetch", 1)
        assert seen[0] == (calls, calls * source.nbytes // world.size)


@on_ranks(2, 3)
def test_different_inputs_are_refused_on_every_rank(world: World) -> None:
    policy = ActivationCheckpointingConfig(partition_activations=True)
    torch.manual_seed(world.seed)
    same_everywhere = torch.randn(64, WIDTH, requires_grad=True) * 1
    wrong = [
        same_everywhere + (world.rank == 1),
        same_everywhere[: 64 - (world.rank == 1)] * 1,
        same_everywhere.to(torch.bfloat16 if world.rank == 1 else torch.float16),
        same_everywhere.t().contiguous().t() if world.rank == 1 else same_everywhere,
    ]
    for inputs in wrong:
        checkpointing = ActivationCheckpointing(policy, world.group)
        with pytest.raises(DifferentInputsError, match=r"sin differ between the ranks: ranks \[1\] hold"):
            checkpointing(torch.sin, inputs)
        world.barrier()
    checkpointing = ActivationCheckpointing(policy, world.group)
    first = checkpointing(torch.sin, same_everywhere)
    with pytest.raises(DifferentInputsError, match="cos differ"):  # later calls are compared too
        checkpointing(torch.cos, first + (world.rank == 1))


@on_ranks(2, 3)
def test_a_rank_with_nothing_to_move_is_refused_on_every_rank(world: World) -> None:
    """Shapes on both sides of min_offload_bytes, and what was an input on one rank only before."""
    policy = ActivationCheckpointingConfig(partition_activations=True, min_offload_bytes=2048)
    torch.manual_seed(world.seed)
    shared = torch.randn(64, WIDTH, requires_grad=True) * 1
    began = time.monotonic()
    for case in ("small", "known", "first small"):
        checkpointing = ActivationCheckpointing(policy, world.group, timeout_seconds=120.0)
        inputs = shared
        if case == "known" and world.rank == 1:
            checkpointing._to_move([shared], shared.device)
        elif case != "known":
            differs = (world.rank == 1) if case == "small" else (world.rank == 0)
            inputs = torch.ones(7 if differs else 64, WIDTH, requires_grad=True) * 1
        with pytest.raises(DifferentInputsError, match="sin differ between the ranks"):
            checkpointing(torch.sin, inputs)
        world.barrier()
    assert time.monotonic() - began < 38  # of 40 seconds
    checkpointing = ActivationCheckpointing(policy, world.group)
    out = checkpointing(torch.sin, torch.ones(7, WIDTH, requires_grad=True) * 1)  # nothing on any rank
    out = out.sum() + checkpointing(torch.sin, shared).sum()
    assert checkpointing.used_bytes() == -(-shared.nbytes // (4096 * world.size)) * 4096
    out.backward()


@on_ranks(2)
def test_the_first_call_of_every_step_is_compared(world: World) -> None:
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(partition_activations=True), world.group
    )
    torch.manual_seed(world.seed)
    inputs, small = torch.randn(64, WIDTH, requires_grad=True), torch.ones(1, requires_grad=True)
    for _ in range(2):
        checkpointing(torch.sin, small)  # moves nothing: the next call is the first one
        checkpointing(torch.cos, checkpointing(torch.sin, inputs * 1)).sum().backward()
    checkpointing(torch.sin, small)
    with pytest.raises(DifferentInputsError, match="tan differ between"):
        checkpointing(torch.tan, inputs + world.rank)


@on_ranks(2, 3)
def test_later_calls_are_compared_when_backward_begins(world: World) -> None:
    """Whatever is different there, gradients would be wrong; a step without it is good again."""
    torch.manual_seed(world.seed)
    inputs, last = torch.randn(64, WIDTH, requires_grad=True), world.rank == world.size - 1

    def others(x: torch.Tensor) -> list[torch.Tensor]:
        permuted = x[torch.arange(len(x)).roll(int(last))]
        return [
            x + last,
            permuted,
            (x[:32] if last else x) * 1,
            x.to(torch.float16 if last else torch.bfloat16),
        ]

    for tier in ("device", "host"):
        policy = ActivationCheckpointingConfig(partition_activations=True, tier=tier)
        checkpointing = ActivationCheckpointing(policy, world.group, timeout_seconds=120.0)

        def step(between: Callable[[torch.Tensor], torch.Tensor], checkpointing: Any = checkpointing) -> Any:
            hidden = checkpointing(torch.cos, checkpointing(torch.sin, inputs * 1))
            hidden = checkpointing(torch.tan, between(hidden))
            return torch.autograd.grad(checkpointing(torch.cos, hidden).float().sum(), inputs)[0]

        wanted = step(lambda x: x)
        for number in range(len(others(inputs))):
            with pytest.raises(DifferentInputsError, match=r"\.cos, .*\.tan\) differ .* hold"):
                step(lambda x, number=number: others(x)[number])
            world.barrier()
            assert torch.equal(step(lambda x: x), wanted)


@on_ranks(2)
def test_a_rank_with_fewer_calls_is_refused_on_every_rank(world: World) -> None:
    policy = ActivationCheckpointingConfig(partition_activations=True)
    checkpointing = ActivationCheckpointing(policy, world.group, timeout_seconds=120.0)
    inputs, began = torch.ones(64, WIDTH, requires_grad=True), time.monotonic()
    for rank in (None, 0, 1):
        hidden = checkpointing(torch.sin, inputs * 1)
        if world.rank != rank:
            hidden = checkpointing(torch.cos, hidden)
        if rank is None:
            hidden.sum().backward()
        else:
            with pytest.raises(DifferentInputsError, match="differ between the ranks: ranks \\[1\\] hold"):
                hidden.sum().backward()
        world.barrier()
    assert time.monotonic() - began < 38  # of 40 seconds


@on_ranks(2)
def test_groups_that_are_refused(world: World) -> None:
    policy = ActivationCheckpointingConfig(partition_activations=True)
    inputs = torch.randn(64, WIDTH, requires_grad=True) * 1
    with pytest.raises(ValueError, match="partition_activations: expected an activation_group, got none"):
        ActivationCheckpointing(policy)(torch.sin, inputs)
    with pytest.raises(ValueError, match=r"at most one data-parallel rank, got \[0, 1\]"):
        ActivationCheckpointing(policy, world.group, data_parallel_group=world.group)
    model = nn.Linear(4, 4)
    config = {"activation_checkpointing": {"partition_activations": True}}
    with pytest.raises(ValueError, match=r"at most one data-parallel rank, got \[0, 1\]"):
        zero_ext.prepare(
            model, None, config, process_group=world.group, activation_group=world.group, wrap=False
        )
    with pytest.raises(ValueError, match="partition_activations is false"):
        zero_ext.prepare(model, None, {}, process_group=world.group, activation_group=world.group)


class Broken:
    """A transfer that failed."""

    def wait(self) -> None:
        raise RuntimeError("the disk is gone")

    def wait_source(self) -> None:
        return None

    def stream_context(self) -> contextlib.AbstractContextManager[object]:
        self.wait()
        return contextlib.nullcontext()


# The error of a rank whose peer aborted: the reason where the ranks share a host's memory, else what it
# waited for.
PEER_ERRORS = "the disk is gone|partitioned inputs of"


@on_ranks(2)
def test_a_rank_whose_storage_fails_ends_the_others_wait(world: World) -> None:
    """Storage fails on one rank in backward: the other one raises the reason instead of waiting."""
    policy = ActivationCheckpointingConfig(partition_activations=True, prefetch=0)
    checkpointing = ActivationCheckpointing(policy, world.group)
    torch.manual_seed(world.seed)
    out = checkpointing(torch.sin, torch.randn(64, WIDTH, requires_grad=True) * 1)
    (offloader,) = checkpointing._offloaders.values()
    if world.rank == 1:
        offloader.storage.fetch = lambda extent, into: Broken()  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the disk is gone" if world.rank == 1 else PEER_ERRORS):
        out.sum().backward()


@on_ranks(2)
def test_a_write_that_failed_on_one_rank_ends_the_others_wait(world: World) -> None:
    policy = ActivationCheckpointingConfig(partition_activations=True, tier="host", prefetch=0)
    checkpointing, records = ActivationCheckpointing(policy, world.group, timeout_seconds=120.0), []
    torch.manual_seed(world.seed)
    with noted_records(records):
        out = checkpointing(torch.sin, torch.randn(64, WIDTH, requires_grad=True) * 1)
    if world.rank == 1:
        for record in records:
            record.extent.written = Broken()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the disk is gone" if world.rank == 1 else PEER_ERRORS):
        out.sum().backward()
    assert time.monotonic() - began < 38  # of 40 seconds


@on_ranks(2)
def test_a_rank_without_storage_ends_the_others_wait(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = folder if world.rank == 0 else f"{__file__}/below"
        policy = ActivationCheckpointingConfig(partition_activations=True, tier="nvme", nvme_paths=(path,))
        checkpointing = ActivationCheckpointing(policy, world.group, timeout_seconds=120.0)
        torch.manual_seed(world.seed)
        inputs = torch.randn(64, WIDTH, requires_grad=True) * 1
        began = time.monotonic()
        wanted = "below" if world.rank == 1 else "comparison of the inputs"
        with pytest.raises(RuntimeError, match=wanted) as raised:
            checkpointing(torch.sin, inputs)
        waited = time.monotonic() - began
        world.barrier()  # the error holds rank 1's connections, which would close with it
        assert waited < 38 and raised.value is not None


@on_ranks(2)
def test_results_that_are_summed_in_place_are_not_saved(world: World) -> None:
    """If saved, the sums would be summed again: torch does not see that a collective changes its argument."""
    blocks, streams = stack(world, torch.float32, InplaceAllReduce)
    wanted = slopes(world, blocks, streams, None)
    budget = ActivationCheckpointing(ActivationCheckpointingConfig(save_budget_bytes=2**30), streams=streams)
    for _ in range(3):
        assert same(slopes(world, blocks, streams, budget), wanted)
    named = ActivationCheckpointing(ActivationCheckpointingConfig(save_ops=("aten.mm",)), streams=streams)
    with pytest.raises(ValueError, match=r"saves the result of 'aten.mm.default', which 'c10d.allreduce_"):
        slopes(world, blocks, streams, named)
    copied, streams = stack(world, torch.float32)
    wanted = slopes(world, copied, streams, None)
    named = ActivationCheckpointing(ActivationCheckpointingConfig(save_ops=("aten.mm",)), streams=streams)
    assert same(slopes(world, copied, streams, named), wanted)


@on_ranks(2)
def test_every_rank_runs_collectives_again(world: World) -> None:
    """A plan comes from a rank's own timings: another rank would wait for what one rank saved."""
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(save_budget_bytes=2**30))

    def summed(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x.detach(), "sum", world.group)
        return (x * total).sin() * total

    for _ in range(2):
        with Counting() as mode:
            checkpointing(summed, torch.randn(64, WIDTH, requires_grad=True) * 1).sum().backward()
    assert mode.count["_c10d_functional.all_reduce.default"] == 2
