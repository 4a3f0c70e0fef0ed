"""``linear_cross_entropy`` is torch's linear layer and cross entropy, in the memory of one chunk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.training import mesh_of
from zero_ext import linear_cross_entropy
from zero_ext.activation import chunked_cross_entropy
from zero_ext.zero import engine_of

BATCH, LENGTH, WIDTH, WORDS = 3, 11, 8, 37
CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "one_token_chunks": {"chunk_tokens": 1},
    "one_chunk": {"chunk_tokens": 1000},
    "auto": {"chunk_tokens": "auto"},
    "shift": {"shift": True},
    "shift_none": {"shift": True, "reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.3},
    "softcap": {"softcap": 1.5},
    "ignore_index": {"ignore_index": 5},
    "all_terms": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0, "shift": True},
    "all_terms_none": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0, "reduction": "none"},
}
DTYPES = ("float64", "float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def seed() -> int:
    value = torch.seed() & 0x7FFFFFFF
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


def inputs_of(dtype: torch.dtype, ignored: int = -100) -> tuple[list[Tensor], Tensor]:
    """Hidden, weight and bias that need gradients, and labels, some of which do not count."""
    shapes = ((BATCH, LENGTH, WIDTH), (WORDS, WIDTH), (WORDS,))
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(WORDS, (BATCH, LENGTH))
    labels[0, :4] = ignored
    return tensors, labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """The same loss by torch, from all logits."""
    options.pop("chunk_tokens", None)
    shift, z_loss, softcap = (options.pop(name, None) for name in ("shift", "z_loss", "softcap"))
    reduction, ignored = options.pop("reduction", "mean"), options.setdefault("ignore_index", -100)
    logits = nn.functional.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", **options)
    counted = labels.flatten() != ignored
    if z_loss:
        losses = losses + z_loss * (logits.logsumexp(-1).flatten().square()).where(counted, 0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """With different weights of the losses, where there are several."""
    weights = torch.linspace(0.5, 2, max(loss.numel(), 1), dtype=torch.float64)[: loss.numel()]
    return list(torch.autograd.grad((loss * weights.view(loss.shape).to(loss.dtype)).sum(), tensors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("block_bytes", [chunked_cross_entropy._SUM_BLOCK_BYTES, 5 * 4 * WIDTH], ids=str)
def test_values_and_gradients_are_torchs(
    options: dict[str, Any], dtype: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sum of the weight's gradient is in several blocks."""
    monkeypatch.setattr(chunked_cross_entropy, "_SUM_BLOCK_BYTES", block_bytes)
    kind: torch.dtype = getattr(torch, dtype)
    tensors, labels = inputs_of(kind, options.get("ignore_index", -100))
    exact = [each.detach().double().requires_grad_() for each in tensors]
    found = linear_cross_entropy(tensors[0], tensors[1], labels, tensors[2], **{"chunk_tokens": 7, **options})
    wanted = reference(exact[0], exact[1], labels, exact[2], **options)
    assert found.dtype == torch.promote_types(kind, torch.float32) and found.shape == wanted.shape
    tolerance = 1e-12 if kind == torch.float64 else 40 * torch.finfo(kind).eps
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients(found, tensors), gradients(wanted, exact), strict=True):
        assert one.dtype == kind
        size = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, CASES["all_terms"], CASES["none"]], ids=["plain", "all_terms", "none"]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_products_of_low_rank_are_added_to_logits(options: dict[str, Any], dtype: str, frozen: bool) -> None:
    """As one head with the factors alongside its weight. A frozen weight gets no gradient."""
    kind: torch.dtype = getattr(torch, dtype)
    tensors, labels = inputs_of(kind)
    pairs = [(torch.randn(BATCH, LENGTH, rank), torch.randn(WORDS, rank)) for rank in (2, 3)]
    factors = [each.to(kind).requires_grad_() for pair in pairs for each in pair]
    exact = [each.detach().double().requires_grad_() for each in (*tensors, *factors)]
    tensors[1].requires_grad_(not frozen)
    found = linear_cross_entropy(
        *tensors[:2],
        labels,
        tensors[2],
        low_rank=[(factors[0], factors[1]), (factors[2], factors[3])],
        **{"chunk_tokens": 7, **options},
    )
    hidden, weight = torch.cat(exact[::2][:1] + exact[3::2], -1), torch.cat(exact[1:2] + exact[4::2], -1)
    wanted = reference(hidden, weight, labels, exact[2], **options)
    tolerance = 1e-12 if kind == torch.float64 else 60 * torch.finfo(kind).eps
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=tolerance, atol=tolerance)
    chosen = [number for number in range(7) if number != 1 or not frozen]
    leaves = [[(*tensors, *factors)[number] for number in chosen], [exact[number] for number in chosen]]
    for one, other in zip(gradients(found, leaves[0]), gradients(wanted, leaves[1]), strict=True):
        assert one.dtype == kind
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_the_gradients_that_are_needed(needed: tuple[int, ...]) -> None:
    tensors, labels = inputs_of(torch.float64)
    for index, each in enumerate(tensors):
        each.requires_grad_(index in needed)
    chosen = [tensors[index] for index in needed]
    found = linear_cross_entropy(tensors[0], tensors[1], labels, tensors[2], chunk_tokens=5)
    wanted = reference(tensors[0], tensors[1], labels, tensors[2])
    for one, other in zip(gradients(found, chosen), gradients(wanted, chosen), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_token_counts(reduction: Any, smoothing: float) -> None:
    tensors, labels = inputs_of(torch.float32)
    for hidden, wanted in ((tensors[0], labels.fill_(-100)), (tensors[0][:0], labels[:0])):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        found = linear_cross_entropy(hidden, tensors[1], wanted, tensors[2], **options)
        expected = reference(hidden, tensors[1], wanted, tensors[2], **options)
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert bool(found.isnan().all()) == (reduction == "mean" or found.numel() == 0)
        for each in gradients(found, tensors):
            assert not each.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits_have_the_gradients_of_their_differences(dtype: torch.dtype) -> None:
    """A softmax does not depend on a number that is added to all logits."""
    generator = torch.Generator().manual_seed(0)
    # Sums of these are exact.
    hidden = torch.randint(-8, 9, (6, 4), generator=generator).to(dtype) / 8
    weight = torch.randint(-8, 9, (40, 4), generator=generator).to(dtype) / 8
    labels = torch.randint(40, (6,), generator=generator)
    found = []
    for added in (0.0, 8192.0):
        bias = torch.full((40,), added, dtype=dtype).requires_grad_()
        zero_ext.linear_cross_entropy(hidden, weight, labels, bias).backward()
        assert bias.grad is not None
        found.append(bias.grad)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def test_fp16_gradients_of_a_mean_do_not_vanish() -> None:
    """A mean over many tokens, scaled as a loss scaler does: each alone is below fp16's least."""
    tokens = 4096
    hidden, weight = torch.randn(tokens, WIDTH), torch.randn(WORDS, WIDTH)
    labels = torch.randint(WORDS, (tokens,))
    half = [each.half().requires_grad_() for each in (hidden, weight)]
    full = [each.detach().double().requires_grad_() for each in half]
    found = linear_cross_entropy(half[0], half[1], labels, chunk_tokens=100) * 2.0**16
    wanted = reference(full[0], full[1], labels, None) * 2.0**16
    for one, other in zip(gradients(found, half), gradients(wanted, full), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=float(4e-3 * other.abs().max()))


def test_fp16_sums_over_many_tokens_do_not_overflow() -> None:
    """A frequent word and a mean that is not zero: sums of unscaled gradients pass fp16's largest number."""
    hidden = (torch.randn(20_000, 8) + 4).half()
    weight = (torch.randn(64, 8) * 0.02).half().requires_grad_()
    labels = torch.randint(64, (20_000,)).where(torch.rand(20_000) < 0.1, 32)
    (found,) = gradients(linear_cross_entropy(hidden, weight, labels), [weight])
    (wanted,) = gradients(cross_entropy((hidden @ weight.T).double(), labels), [weight])
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.001)


@pytest.mark.parametrize("narrow", [True, False], ids=["bfloat16 products", "float32 products"])
def test_the_weights_gradient_is_summed_in_float32(narrow: bool) -> None:
    """Over 512 chunks of equal tokens. A sum in bfloat16 stops growing at 256 times a chunk's."""
    hidden = torch.ones(512, WIDTH, dtype=torch.bfloat16)
    weight = torch.zeros(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.int64)
    with mock.patch.object(chunked_cross_entropy, "_has_narrow_products", lambda _: narrow):
        loss = linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_tokens=1)
    (found,) = torch.autograd.grad(loss, weight)
    assert torch.equal(found[0], torch.full((WIDTH,), -0.75 * 512, dtype=torch.bfloat16))


def test_autocast_is_that_of_a_linear_layer() -> None:
    tensors, labels = inputs_of(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(tensors[0], tensors[1], labels, tensors[2])
        wanted = reference(tensors[0], tensors[1], labels, tensors[2])
    torch.testing.assert_close(found, wanted.float(), rtol=1e-2, atol=0)
    for one, other in zip(gradients(found, tensors), gradients(wanted, tensors), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=float(2e-2 * other.abs().max()))


def test_autocast_leaves_float64() -> None:
    (hidden, weight, _), labels = inputs_of(torch.float64)
    wanted = linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), wanted)


def test_sequences_without_tokens_and_the_next_token() -> None:
    empty = torch.zeros(2, 0, 8), torch.zeros(5, 8), torch.zeros(2, 0, dtype=torch.int32)
    assert linear_cross_entropy(*empty, shift=True, reduction="sum") == 0
    assert linear_cross_entropy(*empty, shift=True).isnan()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: Any) -> None:
    (hidden, weight, _), labels = inputs_of(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="got it with create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_backward_runs_once() -> None:
    tensors, labels = inputs_of(torch.float32)
    loss = linear_cross_entropy(tensors[0], tensors[1], labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one backward, got a second one"):
        loss.backward()
    with torch.no_grad():
        assert not linear_cross_entropy(tensors[0], tensors[1], labels).requires_grad


WIDE, SHORT = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
HEAD = torch.zeros(5, 8)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "labels": ((WIDE, HEAD, SHORT[:1]), {}, r"labels: expected shape .* got \(1, 3\)"),
    "float_labels": ((WIDE, HEAD, SHORT.float()), {}, "labels: expected int64 or int32, got torch.float32"),
    "width": ((WIDE, HEAD[:, :4], SHORT), {}, r"weight: expected shape \[vocabulary, 8\]"),
    "bias": ((WIDE, HEAD, SHORT, HEAD[0]), {}, r"bias: expected shape \(5,\), got \(8,\)"),
    "dtypes": ((WIDE, HEAD.double(), SHORT), {}, "hidden: expected one float dtype"),
    "chunk": ((WIDE, HEAD, SHORT), {"chunk_tokens": 0}, "chunk_tokens: expected 'auto' or an integer"),
    "chunk_bool": ((WIDE, HEAD, SHORT), {"chunk_tokens": True}, "chunk_tokens: expected 'auto'"),
    "reduction": ((WIDE, HEAD, SHORT), {"reduction": "max"}, "reduction: expected 'mean', 'sum' or 'none'"),
    "smoothing": ((WIDE, HEAD, SHORT), {"label_smoothing": 1.5}, "label_smoothing: expected 0 to 1, got 1.5"),
    "z_loss": ((WIDE, HEAD, SHORT), {"z_loss": -1.0}, "z_loss: expected a finite factor"),
    "softcap": ((WIDE, HEAD, SHORT), {"softcap": 0.0}, "softcap: expected a finite number above 0"),
    "low_rank": (
        (WIDE, HEAD, SHORT),
        {"low_rank": [(WIDE[..., :2], HEAD)]},
        r"low_rank: expected pairs .* \(2, 3, 8\) and weight \(5, 8\), got \[\(2, 3, 2\), \(5, 8\)\]",
    ),
    "low_rank_no_pairs": (
        (WIDE, HEAD, SHORT),
        {"low_rank": (WIDE[0], HEAD)},
        "low_rank: expected pairs .* got Tensor. Pass a list of pairs",
    ),
    "low_rank_scalar": (
        (WIDE, HEAD, SHORT),
        {"low_rank": [(torch.tensor(1.0), HEAD)]},
        r"low_rank: expected pairs .* got \[\(\), \(5, 8\)\]",
    ),
    "low_rank_dtype": (
        (WIDE, HEAD, SHORT),
        {"low_rank": [(WIDE.double(), HEAD)]},
        "hidden: expected one float dtype of hidden, weight, bias and low_rank",
    ),
}


@pytest.mark.parametrize(("arguments", "options", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_what_it_refuses(arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        linear_cross_entropy(*arguments, **options)


@pytest.mark.parametrize("label", [5, -1])
def test_labels_outside_the_vocabulary(label: int) -> None:
    with pytest.raises(RuntimeError, match="labels: expected 0 to 4 or ignore_index"):
        linear_cross_entropy(WIDE, HEAD, SHORT + label)


MEASURE = """
import re, torch, zero_ext
from pathlib import Path
from torch.nn.functional import linear, cross_entropy
torch.set_num_threads(1)
def peak(chunked, dtype, words=8192, tokens=16384, width=16):
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(words, width).to(dtype).requires_grad_()
    labels = torch.randint(words, (tokens,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    field = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS")
    if chunked:
        zero_ext.linear_cross_entropy(hidden, weight, labels).backward()
    else:
        cross_entropy(linear(hidden, weight), labels).backward()
    return (field("VmHWM") - before) / 2**20
for dtype in (torch.float32, torch.bfloat16):
    peak(True, dtype, words=64, tokens=64)  # what the libraries allocate at their first use
    print(dtype, peak(True, dtype), peak(False, dtype))
"""


def test_memory_is_that_of_a_chunk() -> None:
    """Peak of resident memory, in a process of its own: plain torch holds 512 MB of logits several times."""
    command = [sys.executable, "-c", MEASURE]
    root = Path(__file__).resolve().parents[2]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    for line in printed.splitlines():
        dtype, chunked, plain = line.split()
        gradients = (16384 * 16 + 8192 * 16) * 4 / 2**20  # at most, and not yet in .grad
        assert float(chunked) <= 128 * 1.05 + gradients, printed
        assert float(plain) > 500 and dtype.startswith("torch."), printed


class LanguageModel(nn.Module):
    """Returns the loss of its head: in chunks, or with all logits."""

    def __init__(self, chunked: bool, tied: bool) -> None:
        super().__init__()
        self.chunked = chunked
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if not self.chunked:
            return reference(hidden, self.head.weight, ids, self.head.bias, shift=True)
        head = self.head
        return linear_cross_entropy(hidden, head.weight, ids, head.bias, chunk_tokens=7, shift=True)


def language_model(seed: int, chunked: bool, tied: bool) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(chunked, tied)


@on_ranks(2, by_turns=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sharded_training_is_that_of_one_process(world: World, tied: bool, stage: int) -> None:
    """Losses and parameters, and the traffic of the same model with all logits: the head's weight is gathered
    as often, and its gradient is reduced once."""
    draw = torch.Generator().manual_seed(world.seed)
    steps = torch.randint(WORDS, (3, world.size, 2, LENGTH), generator=draw)
    alone = language_model(world.seed, False, tied).double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    wanted = []
    for ids in steps:
        optimizer.zero_grad()
        loss = torch.stack([alone(each) for each in ids]).mean()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    traffic = []
    for chunked in (False, True):
        model = language_model(world.seed, chunked, tied)
        made = torch.optim.SGD(model.parameters(), lr=0.5)
        sharded, sharded_optimizer = zero_ext.prepare(
            model, made, {"stage": stage}, process_group=world.group
        )
        for number, ids in enumerate(steps):
            loss = sharded(ids[world.rank])
            sharded.backward(loss)
            sharded_optimizer.step()
            sharded_optimizer.zero_grad()
            mean = sum(world.everyone(float(loss.detach()))) / world.size
            assert mean == pytest.approx(wanted[number], rel=1e-5)
        traffic.append(dict(engine_of(sharded).traffic.last_elements))
        full = zero_ext.full_state_dict(sharded)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(full[name].double(), value, rtol=1e-4, atol=1e-5, msg=name)
    assert traffic[0] == traffic[1]


@on_ranks(2)
def test_a_released_weight_of_stage_3_is_gathered_for_the_call(world: World) -> None:
    """Outside of any forward, where parameters have no values in memory."""
    tensors, labels = inputs_of(torch.float32)
    torch.manual_seed(world.seed)
    plain = nn.Linear(WIDTH, WORDS)
    wanted = reference(tensors[0].detach(), plain.weight, labels, plain.bias)
    sharded, _ = zero_ext.prepare(nn.Sequential(plain), None, {"stage": 3}, process_group=world.group)
    head = sharded.module[0]
    found = linear_cross_entropy(tensors[0].detach(), head.weight, labels, head.bias, chunk_tokens=7)
    torch.testing.assert_close(found.detach(), wanted.detach())


@on_ranks(4)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_vocabulary_split_over_ranks(world: World, options: dict[str, Any]) -> None:
    torch.manual_seed(world.seed)
    mesh = mesh_of(tp=4)["tp"]
    tensors, labels = inputs_of(torch.float64, options.get("ignore_index", -100))
    split = [distribute_tensor(each.detach(), mesh, [Shard(0)]).requires_grad_() for each in tensors[1:]]
    leaves = [tensors[0], *split]
    found = linear_cross_entropy(tensors[0], split[0], labels, split[1], **{"chunk_tokens": 7, **options})
    wanted = reference(tensors[0], tensors[1], labels, tensors[2], **options)
    assert not isinstance(found, DTensor)
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(found, leaves), gradients(wanted, tensors), strict=True):
        full = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(full, other, rtol=1e-10, atol=1e-12)


@on_ranks(4)
def test_ranks_with_fewer_words_have_the_same_chunks(world: World) -> None:
    torch.manual_seed(world.seed)
    tensors, labels = inputs_of(torch.float64)
    words = tensors[1].shape[0] // 2 * 2 - 1
    weight = tensors[1].detach()[:words]
    split = distribute_tensor(weight, mesh_of(tp=2)["tp"], [Shard(0)])
    few = chunked_cross_entropy._PRODUCT_BYTES + 8 * (words // 2 + 1) * 5
    with mock.patch.object(chunked_cross_entropy, "CHUNK_BYTES", few):
        found = linear_cross_entropy(tensors[0].detach(), split, labels % words)
    wanted = cross_entropy((tensors[0].detach() @ weight.T).flatten(0, -2), (labels % words).flatten())
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "chunk_bytes, of_weight, chunks",
    [
        pytest.param(64, True, 7, id="the wider sum needs half of it"),
        pytest.param(64, False, 4, id="no sum"),
        pytest.param(62, True, 4, id="the wider sum needs more than a half"),
    ],
)
def test_chunks_and_the_wider_sum_share_the_budget(chunk_bytes: int, of_weight: bool, chunks: int) -> None:
    """The sum needs 32 bytes beyond the weight's gradient, logits of a token 8."""
    hidden = torch.zeros(28, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=of_weight)
    head = chunked_cross_entropy._ChunkedHead
    with (
        mock.patch.multiple(chunked_cross_entropy, CHUNK_BYTES=chunk_bytes, _PRODUCT_BYTES=0),
        mock.patch.object(chunked_cross_entropy, "_has_narrow_products", lambda tensor: True),
        mock.patch.object(head, "_compute_logits", autospec=True, side_effect=head._compute_logits) as called,
    ):
        linear_cross_entropy(hidden, weight, torch.zeros(28, dtype=torch.int64))
    assert called.call_count == chunks


@on_ranks(4)
def test_tokens_that_differ_on_the_ranks_of_a_split_weight(world: World) -> None:
    split = distribute_tensor(HEAD, mesh_of(tp=2)["tp"], [Shard(0)])
    with pytest.raises(RuntimeError, match="labels: expected the same on all ranks"):
        linear_cross_entropy(WIDE, split, (SHORT + world.rank) % 5)


@on_ranks(4)
def test_splits_that_it_refuses(world: World) -> None:
    mesh = mesh_of(tp=2)["tp"]
    replicated = distribute_tensor(HEAD, mesh, [Replicate()])
    split = distribute_tensor(HEAD, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="weight: expected a DTensor split along its first dimension"):
        linear_cross_entropy(WIDE, replicated, SHORT)
    with pytest.raises(ValueError, match="bias: expected a DTensor split along its first dimension"):
        linear_cross_entropy(WIDE, split, SHORT, torch.zeros(5))
    with pytest.raises(ValueError, match="low_rank: expected none with a weight that is split over ranks"):
        linear_cross_entropy(WIDE, split, SHORT, low_rank=[(WIDE, HEAD)])
    with pytest.raises(ValueError, match="hidden: expected all tokens on all ranks"):
        linear_cross_entropy(distribute_tensor(WIDE, mesh, [Shard(1)]), split, SHORT)
    with pytest.raises(ValueError, match="vocabulary: expected words for all 2 ranks, got 1"):
        linear_cross_entropy(WIDE, distribute_tensor(HEAD[:1], mesh, [Shard(0)]), SHORT)
