"""torch.library.opcheck on every op; tests/test_house_rules.py checks that none is missing here."""

from __future__ import annotations

import atexit
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.accelerator.cufile.library import fake_cufile
from tests.ops.optimizer_steps import ADAM_8BIT, LAMB, STEP_OPS, State, StepOp
from zero_ext import ops

STREAM = 0x57  # the handle
STACK = ExitStack()
atexit.register(STACK.close)


@cache
def scratch() -> Path:
    return Path(STACK.enter_context(tempfile.TemporaryDirectory(prefix="zero_ext-opcheck-")))


def step_state(family: StepOp, **options: Any) -> State:
    """Of two segments, over more than one block of 8-bit moments."""
    segments = [(0, 5), (6, 300)]
    options = {"grad": torch.bfloat16, "param": torch.float16, **options}
    return family.state(torch.Generator(), 300, segments, [{}, {}], **options)


def lamb_norms_inputs() -> tuple[Any, ...]:
    state = step_state(LAMB)
    buffers = (state.master, state.exp_avg, state.exp_avg_sq, state.grad)
    return (*buffers, state.segments, state.hyper, state.grad_scale, torch.zeros(2, 2, 33, dtype=torch.int64))


def quantized(signed: bool) -> tuple[Tensor, Tensor]:
    return ops.quantize_blockwise(torch.rand(300), signed)


def accumulator() -> Tensor:
    result = torch.zeros(33, dtype=torch.int64)
    ops.squared_norm_(torch.rand(7), result)
    return result


def flat_inputs() -> tuple[Tensor, list[Tensor], list[int]]:
    return torch.rand(16), [torch.rand(2, 3).bfloat16(), torch.rand(5)], [9, 1]


def host_exchange() -> int:
    """Rank 0 of two that are both in this process."""
    name = f"/zero_ext-opcheck-{uuid.uuid4().hex}"
    handles = [uuid.uuid4().int >> 65 for _ in range(2)]
    for rank, handle in enumerate(handles):
        ops.cross_process_open(handle, name, rank, 2, rank == 0)
    ops.cross_process_unlink(name)
    for handle in handles:
        if not ops.cross_process_connect(handle):
            raise AssertionError("a process cannot read its own memory")
    return handles[0]


def aio_engine() -> int:
    handle = uuid.uuid4().int >> 65
    ops.aio_open(handle, "threads")
    return handle


def aio_file() -> str:
    """A file of 64 bytes that exists until the tests end."""
    path = scratch() / uuid.uuid4().hex
    path.write_bytes(bytes(64))
    return str(path)


def join_again() -> str:
    """A segment that exists until the tests end, so that it can be joined again and again."""
    name = f"/zero_ext-opcheck-{uuid.uuid4().hex}"
    ops.cross_process_open(1, name, 0, 1, True)
    atexit.register(ops.cross_process_unlink, name)
    return name


def store_arguments() -> tuple[int, list[str], str, list[int], int, bool, bool]:
    """Those of store_open: two files that do not exist, which each call makes anew."""
    handle = uuid.uuid4().int >> 65
    paths = [str(scratch() / f"{handle}-{i}") for i in range(2)]
    atexit.register(ops.store_close, handle)
    return handle, paths, "threads", [2, 4096, 1], 4096, True, False


def store() -> int:
    """An open store with an extent of two pages at its start."""
    handle, paths, backend, (depth, block, io_threads), *rest = store_arguments()
    ops.store_open(handle, paths, backend, (depth, block, io_threads), *rest)
    ops.store_reserve(handle, 1 << 20)
    ops.store_allocate(handle, 8192)
    return handle


def direct_store() -> int:
    """As store(), by a fake cuFile, whose device memory is the host's."""
    fake_cufile()
    handle, paths, backend, (depth, block, io_threads), stripe, _, devices = store_arguments()
    ops.store_open(handle, paths, backend, (depth, block, io_threads), stripe, False, devices)
    ops.store_reserve(handle, 1 << 20)
    ops.store_allocate(handle, 8192)
    ops.store_open_direct(handle)
    return handle


def attention_inputs() -> tuple[Any, ...]:
    """Those of the forward: two query heads, one key head, lengths that blocks do not divide."""
    rows = [torch.randn(2, heads, length, 16) for heads, length in ((2, 20), (1, 40), (1, 40))]
    pointers, columns = torch.tensor([[0, 2, 3]]), torch.tensor([0, 2, 1])
    column_pointers, transposed = torch.tensor([[0, 1, 2, 3]]), torch.tensor([0, 1, 0])
    layout = [each.int() for each in (pointers, columns, column_pointers, transposed)]
    return (*rows, *layout, torch.rand(2, 40) < 0.9, torch.randn(1, 2, 1, 40), 16, False, 0.25, 0.1, 3, 4)


def attention_backward_inputs() -> tuple[Any, ...]:
    arguments = attention_inputs()
    output, logsumexp = torch.ops.zero_ext.block_sparse_attention_forward(*arguments)
    query, key, value, *others = arguments
    return (torch.randn_like(output), query, key, value, output, logsumexp, *others, True)


def sign_payloads(count: int, messages: int) -> Tensor:
    """Messages to signs of `count` elements each."""
    found = torch.zeros(messages * ops.sign_payload_bytes(count), dtype=torch.uint8)
    ops.compress_1bit_(found, torch.zeros(messages * count), torch.randn(messages * count), 1.0, messages)
    return found


def blocks(count: int, messages: int) -> Tensor:
    """Messages of `count` elements each in blocks of 256 symmetric integers of 4 bits."""
    format = ops.BlockFormat(4, True)
    found = torch.zeros(messages * format.payload_bytes(count), dtype=torch.uint8)
    ops.quantize_(found, torch.randn(messages * count), format, messages)
    return found


STEPS = {family.name: family for family in (*STEP_OPS, ADAM_8BIT)}
SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{name: lambda family=each: tuple(step_state(family).arguments()) for name, each in STEPS.items()},
    "accumulate_": flat_inputs,
    "aio_close": lambda: (aio_engine(),),
    "aio_close_all": lambda: (),
    "aio_inject_fault": lambda: (aio_engine(), False, 0, -5, 1),
    "aio_read_": lambda: (aio_engine(), 1, aio_file(), 0, torch.rand(16)),
    "aio_wait": lambda: (aio_engine(), 1),
    "aio_write_": lambda: (aio_engine(), 1, aio_file(), 0, torch.rand(16)),
    "nan_filled_host_memory": lambda: (4096,),
    "block_sparse_attention_backward": attention_backward_inputs,
    "block_sparse_attention_forward": attention_inputs,
    "compress_1bit_": lambda: (sign_payloads(50, 2), torch.rand(100), torch.rand(100).bfloat16(), 0.5, 2),
    "crc32c": lambda: (torch.arange(100, dtype=torch.uint8), 0),
    "dequantize_": lambda: (torch.rand(600).half(), blocks(300, 2), 4, True, 256, 2),
    "dequantize_blockwise": lambda: (*quantized(True), True),
    "decompress_1bit_": lambda: (torch.rand(100).half(), sign_payloads(50, 2), 0.5, True, 2),
    "flag_non_finite_": lambda: (torch.rand(100).bfloat16(), torch.zeros(1, dtype=torch.int32)),
    "host_buffer": lambda: (4096,),
    "host_buffer_bytes": lambda: (),
    "cross_process_close": lambda: (host_exchange(),),
    "cross_process_connect": lambda: (host_exchange(),),
    "cross_process_abort": lambda: (host_exchange(), "no more"),
    "cross_process_open": lambda: (1, join_again(), 0, 1, False),
    "cross_process_receive": lambda: (host_exchange(), 1, torch.rand(4), 0),
    "cross_process_send": lambda: (host_exchange(), 1, torch.rand(4), 0),
    "cross_process_unlink": lambda: (f"/zero_ext-opcheck-{uuid.uuid4().hex}",),
    "cross_process_wait": lambda: (host_exchange(), 1, 0, True, 1.0),
    "cpu_dispatch_level": lambda: (),
    "lamb_norms_": lamb_norms_inputs,
    "softmax_gradient_": lambda: (torch.randn(3, 7), torch.tensor([1, -1, 6]), torch.randn(4, 3), 2.0),
    "softmax_sums": lambda: (torch.randn(3, 7), torch.tensor([1, -1, 6]), torch.randn(1, 3), 0.0),
    "pack_": flat_inputs,
    "quantize_": lambda: (blocks(300, 2), torch.rand(600).half(), 4, True, 256, 2, [1, 0]),
    "quantize_blockwise": lambda: (torch.rand(300), False),
    "reduce_1bit_": lambda: (sign_payloads(100, 1), torch.rand(100), sign_payloads(100, 3), 0.5),
    "requantize_": lambda: (blocks(300, 2), blocks(300, 6), 4, True, 256, 4, True, 256, 0.5, 2),
    "set_cpu_dispatch_level": lambda: (torch.ops.zero_ext.cpu_dispatch_level(),),
    "squared_norm_": lambda: (torch.rand(100), accumulator()),
    "squared_norm_value": lambda: (accumulator(),),
    "store_close": lambda: (store(),),
    "store_close_direct": lambda: (direct_store(),),
    "store_stats_": lambda: (store(), torch.zeros(6, dtype=torch.int64)),
    "store_inject_fault": lambda: (store(), True, 0, -5, 1),
    "store_open": store_arguments,
    "store_open_direct": lambda: (direct_store(),),
    "store_read_direct_": lambda: (direct_store(), torch.rand(2048), 0, 1),
    "store_write_direct": lambda: (direct_store(), torch.rand(2048), 0, 1),
    "store_read_": lambda: (store(), torch.rand(2048), 0, 1),
    "store_reserve": lambda: (store(), 1 << 21, False),
    "store_wait": lambda: (store(), 1),
    "store_write": lambda: (store(), torch.rand(2048), 0, 1),
    "sum_quantized_": lambda: (torch.rand(300), blocks(300, 2), 4, True, 256, 0.5, True),
    "sum_shards_": lambda: (torch.rand(8).half(), [torch.rand(8), torch.rand(8)], 0.5, True),
    "sum_1bit_": lambda: (torch.rand(100), sign_payloads(100, 2), 0.5, True),
    "pop_device_error_": lambda: (torch.zeros(7, dtype=torch.int64),),
    "unpack_": flat_inputs,
}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zero_ext, name).default, SAMPLES[name]())


def test_ops_that_return_text() -> None:
    # The fourth check, of compiled graphs, cannot compare strings.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.zero_ext.aio_backends.default, (), test_utils=checks)
    options = (2, "threads", 4, 4096, 1)
    torch.library.opcheck(torch.ops.zero_ext.aio_open.default, options, test_utils=checks)
    torch.library.opcheck(torch.ops.zero_ext.store_devices.default, (store(),), test_utils=checks)
    torch.library.opcheck(torch.ops.zero_ext.cufile_unavailable_reason.default, (), test_utils=checks)
    record = torch.zeros(7, dtype=torch.int64)
    torch.library.opcheck(torch.ops.zero_ext.device_error_text.default, (record,), test_utils=checks)


# Each call changes what the next one may do, so that every part of opcheck gets a store of its own, and none
# can compare two calls of store_allocate.
@pytest.mark.parametrize("utility", ["test_schema", "test_autograd_registration", "test_faketensor"])
def test_store_extents(utility: str) -> None:
    handle = store()
    torch.library.opcheck(torch.ops.zero_ext.store_allocate.default, (handle, 4096), test_utils=utility)
    torch.library.opcheck(torch.ops.zero_ext.store_release.default, (handle, 0), test_utils=utility)


@pytest.mark.parametrize("name", STEPS)
def test_steps_with_a_flag_and_without_a_param(name: str) -> None:
    op = getattr(torch.ops.zero_ext, name).default
    torch.library.opcheck(op, (*SAMPLES[name](), torch.zeros(1, dtype=torch.int32)))
    torch.library.opcheck(op, tuple(step_state(STEPS[name], param=None).arguments()))


def test_attention_with_gradients() -> None:
    arguments = list(attention_inputs())
    for position in (0, 1, 2, 8):
        arguments[position].requires_grad_()
    torch.library.opcheck(torch.ops.zero_ext.block_sparse_attention_forward.default, tuple(arguments))
    arguments[5:9] = [None] * 4
    torch.library.opcheck(torch.ops.zero_ext.block_sparse_attention_forward.default, tuple(arguments))


def test_fake_kernels_return_shapes_without_touching_memory() -> None:
    before = ops.host_buffer_bytes()
    with FakeTensorMode():
        buffer = ops.host_buffer(2**50)
        assert buffer.shape == (2**50,) and buffer.dtype == torch.uint8
        value = ops.squared_norm_value(torch.zeros(33, dtype=torch.int64))
        assert value.shape == () and value.dtype == torch.float64
        ops.squared_norm_(torch.zeros(5), torch.zeros(33, dtype=torch.int64))
    assert ops.host_buffer_bytes() == before


def test_ops_compile_into_a_graph() -> None:
    def step(flat: Tensor, tensor: Tensor) -> Tensor:
        torch.ops.zero_ext.pack_(flat, [tensor], [0])
        return flat * 2

    flat, tensor = torch.zeros(4), torch.rand(4)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(flat, tensor), 2 * tensor)
    assert torch.equal(flat, tensor)
