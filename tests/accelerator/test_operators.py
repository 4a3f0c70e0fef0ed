"""Ops on the device: the CPU's results, views that share memory, storages, random numbers, custom ops."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.ops.host_memory import swap_storages_

DEVICE = "stand_in"


@on_ranks(1, stand_in=True)
def test_views_share_memory(world: World) -> None:
    base = torch.arange(24.0, device=DEVICE)
    views = {
        "view": base.view(4, 6),
        "as_strided": base.as_strided((2, 3), (6, 1), 2),
        "unfold": base.unfold(0, 3, 2),
        "slice": base[3:7],
        "dtype": base.view(torch.int32),
        "chunk": base.chunk(3)[1],
        "transpose": base.view(4, 6).t(),
        "expand": base[:1].expand(5),
    }
    for name, view in views.items():
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr(), name
        assert view.device == base.device, name
    base.zero_()
    for name, view in views.items():
        assert not view.any(), name
    views["slice"].fill_(3)
    assert base.sum().item() == 12


@on_ranks(1, stand_in=True)
def test_results_are_the_cpus(world: World) -> None:
    generator = torch.Generator().manual_seed(world.seed)
    left, right = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    cases = {
        "add": lambda x, y: x + y,
        "matmul": lambda x, y: x @ y,
        "topk": lambda x, y: x.topk(3).values,
        "index": lambda x, y: x[y > 0],
        "cat": lambda x, y: torch.cat([x, y]),
        "softmax": lambda x, y: (x * y).softmax(-1),
        "attention": lambda x, y: torch.nn.functional.scaled_dot_product_attention(x, y, x, is_causal=True),
        "norm": lambda x, y: torch.linalg.vector_norm(x),
        "foreach": lambda x, y: torch.stack(torch._foreach_mul([x, y], 2.0)),
        "out": lambda x, y: torch.add(x, y, out=torch.empty(0, device=x.device)),
        "in place": lambda x, y: x.clone().addcmul_(x, y, value=0.5),
        "where": lambda x, y: torch.where(x > y, x, y),
        "sort": lambda x, y: x.sort(descending=True).indices,
        "index_put": lambda x, y: x.clone().index_put_((torch.tensor([1, 1], device=x.device),), y[:2], True),
        "scalar": lambda x, y: x.sum() * 2 + torch.tensor(3.0),
    }
    for name, case in cases.items():
        found = case(left.to(DEVICE), right.to(DEVICE))
        assert found.device.type == DEVICE, name
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert torch.equal(found.cpu(), case(left, right)), name


@on_ranks(1, stand_in=True)
def test_memory_of_storages_can_be_swapped(world: World) -> None:
    storage = torch.arange(10.0, device=DEVICE).untyped_storage()
    other = torch.arange(10.0, 20.0, device=DEVICE)
    view = torch.empty(0, device=DEVICE).set_(storage, 2, (3,))
    swap_storages_(storage, other.untyped_storage())
    assert view.tolist() == [12.0, 13.0, 14.0]
    assert other.tolist() == list(range(10))
    storage = torch._C._construct_storage_from_data_pointer(other.data_ptr() + 8, other.device, 12)
    alias = torch.empty(0, device=DEVICE).set_(storage, 0, (3,))
    alias.mul_(10)
    assert other[:6].tolist() == [0, 1, 20, 30, 40, 5]
    view.set_()
    assert view.numel() == 0


@on_ranks(1, stand_in=True)
def test_random_numbers(world: World) -> None:
    torch.manual_seed(world.seed)
    first = torch.randn(100, device=DEVICE)
    state = torch.stand_in.get_rng_state()
    second = torch.rand(100, device=DEVICE)
    torch.stand_in.set_rng_state(state)
    assert torch.equal(torch.rand(100, device=DEVICE), second)
    torch.manual_seed(world.seed)
    assert torch.equal(torch.randn(100, device=DEVICE), first)
    torch.manual_seed(world.seed)
    assert torch.equal(torch.randn(100), first.cpu())
    own = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(
        torch.randn(5, generator=own, device=DEVICE).cpu(),
        torch.randn(5, generator=torch.Generator().manual_seed(3)),
    )


@on_ranks(1, stand_in=True)
def test_the_packages_ops_run(world: World) -> None:
    import zero_ext  # noqa: F401

    values = torch.arange(40, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="crc32c"):  # as CUDA: there is no kernel of it
        torch.ops.zero_ext.crc32c(values.to(DEVICE), 0)


@on_ranks(1, stand_in=True)
def test_modules_move_with_their_ties(world: World) -> None:
    module = torch.nn.ModuleList([torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False)])
    module[1].weight = shared = module[0].weight
    wanted = shared.detach().clone()
    module.to(DEVICE)
    assert module[0].weight is shared and module[1].weight is shared
    assert shared.device.type == DEVICE and torch.equal(shared.cpu(), wanted)
    module.to(torch.bfloat16).cpu()
    assert module[1].weight is shared and torch.equal(shared, wanted.bfloat16())


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(1, stand_in=True)
def test_checkpointed_blocks(world: World, reentrant: bool) -> None:
    gradients = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(world.seed)
        block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.GELU()).to(device)
        values = torch.randn(4, 8).to(device).requires_grad_()
        torch.manual_seed(world.seed)
        checkpoint(block, values, use_reentrant=reentrant).sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in block.parameters()] + [values.grad.cpu()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@on_ranks(1, stand_in=True)
def test_backward_runs_on_the_devices_thread(world: World) -> None:
    """As on a real device, hooks come from another thread, on the stream of the forward."""
    seen = []
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    side = torch.Stream(device=DEVICE)
    get_thread = ctypes.CDLL(None).pthread_self
    get_thread.restype = ctypes.c_void_p
    with side:
        product = weight * 2
    product.register_hook(lambda _: seen.append((get_thread(), torch.accelerator.current_stream())))
    product.sum().backward()
    assert seen[0][0] != get_thread()
    assert seen[0][1] == side
    assert weight.grad.tolist() == [2, 2, 2]


@on_ranks(1, stand_in=True)
def test_values_of_the_host_are_refused_but_for_scalars_and_indices(world: World) -> None:
    on_device, on_host = torch.ones(3, 4, device=DEVICE), torch.ones(3, 4)
    for mix in (
        lambda: on_device + on_host,
        lambda: torch.nn.functional.linear(on_host, on_device),
        lambda: torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), on_device),
        lambda: torch.cat([on_device, on_host]),
    ):
        with pytest.raises(RuntimeError, match=r"same device, but found .* stand_in:0 and cpu"):
            mix()
    assert (on_device * torch.tensor(2.0)).sum().item() == 24
    assert on_device[torch.tensor([0, 2])].shape == (2, 4)
    assert torch.equal(on_device.cpu(), on_host)


@on_ranks(1, stand_in=True)
def test_a_resized_tensor_has_the_same_values(world: World) -> None:
    tensor = torch.arange(4.0, device=DEVICE)[1:]
    tensor.resize_(2000)
    assert tensor[:3].tolist() == [1.0, 2.0, 3.0] and tensor[3:].isnan().all()
