"""What long contexts cost: the loss in chunks against all logits, packed documents against separate ones.

Run from the repository root: python -m benchmarks.long_context [--tokens 8192] [--words 32768] [--rounds 9]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

import zero_ext
from benchmarks.harness.environment import describe
from benchmarks.harness.process_memory import peak_bytes, reset_peak, resident_bytes, return_free_pages
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import build_model, shape_named
from benchmarks.harness.statistics import ratio_of_rounds
from zero_ext.activation.chunked_cross_entropy import CHUNK_BYTES

LOSS_BAR, DOCUMENT_BAR, MEMORY_BAR = 1.05, 1.10, 1.05
GRAIN = 16


@dataclass
class Duel:
    """zero_ext and a peer that compute the same forward and backward, with the seconds of each round."""

    name: str
    own: Callable[[], float]
    peer: Callable[[], float]
    bar: float
    own_seconds: list[float] = field(default_factory=list)
    peer_seconds: list[float] = field(default_factory=list)
    apart: float = 0.0

    def run(self, rounds: int) -> None:
        """Time both in turn, the first of them by turns too. The first round is not counted."""
        found, wanted = self.own(), self.peer()
        self.apart = abs(found - wanted) / abs(wanted)
        pair = [(self.own, self.own_seconds), (self.peer, self.peer_seconds)]
        for number in range(rounds):
            for call, seconds in pair if number % 2 else reversed(pair):
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)

    def figures(self) -> dict[str, Any]:
        """Everything measured, for JSON."""
        ratio = ratio_of_rounds(self.own_seconds, self.peer_seconds)
        seconds = {"zero_ext": self.own_seconds, "peer": self.peer_seconds}
        rest = {"bar": self.bar, "met": ratio.at_most(self.bar), "apart": self.apart}
        return {"name": self.name, "seconds": seconds, "ratio": asdict(ratio), **rest}


def head_of(tokens: int, words: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a head's weight, which need gradients, and labels."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(words, width, generator=generator) * width**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,), generator=generator)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of zero_ext's op."""
    return zero_ext.linear_cross_entropy(hidden, weight, labels)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of all logits, in float32 as transformers computes it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def narrow(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of all logits in their own dtype."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def differentiated(loss_of: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], float]:
    """Return a call that computes a loss and its gradients."""

    def run() -> float:
        loss = loss_of(*tensors)
        torch.autograd.grad(loss, tensors[:2])
        return loss.item()

    return run


def memory_of(loss_of: Callable[..., Tensor], tensors: Sequence[Tensor]) -> int:
    """Return the peak of resident bytes in forward and backward, beyond inputs and their gradients."""
    hidden, weight, labels = tensors
    few = hidden[:64].detach().requires_grad_()
    differentiated(loss_of, [few, weight, labels[:64]])()  # what libraries allocate once
    return_free_pages()
    before = resident_bytes()
    reset_peak()
    gradients = torch.autograd.grad(loss_of(*tensors), tensors[:2])
    return peak_bytes() - before - sum(each.nbytes for each in gradients)


def document_lengths(tokens: int, count: int, seed: int) -> list[int]:
    """Return lengths of documents of random sizes that fill a row."""
    starts = range(1, tokens // GRAIN)
    cuts = sorted(random.Random(seed).sample(starts, count - 1))
    return [(stop - start) * GRAIN for start, stop in pairwise([0, *cuts, tokens // GRAIN])]


def attention_duel(tokens: int, lengths: Sequence[int], dtype: torch.dtype) -> Duel:
    """Attention of 8 heads of 64 over packed documents, against each document in tensors of its own."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(1, 8, tokens, 64, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    bounds = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    separate = [
        [each.detach()[:, :, start:stop].contiguous().requires_grad_() for each in rows]
        for start, stop in pairwise(bounds)
    ]

    def packed() -> float:
        total = zero_ext.document_attention(*rows, bounds).float().square().sum()
        torch.autograd.grad(total, rows)
        return total.item()

    def alone() -> float:
        found = 0.0
        for document in separate:
            query, key, value = document
            total = F.scaled_dot_product_attention(query, key, value, is_causal=True).float().square().sum()
            torch.autograd.grad(total, document)
            found += total.item()
        return found

    return Duel(f"attention, {len(lengths)} documents, {str(dtype)[6:]}", packed, alone, DOCUMENT_BAR)


def model_duel(name: str, tokens: int, lengths: Sequence[int]) -> Duel:
    """A step's forward and backward of a Llama on a packed row, against a pass for each document."""
    from zero_ext.integrations.transformers import apply_document_attention

    shape = shape_named(name)
    model, twin = build_model(shape), build_model(shape)
    apply_document_attention(model)
    words = torch.randint(shape.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    counted = tokens - len(lengths)

    def packed() -> float:
        loss = model(input_ids=words, position_ids=positions, labels=words).loss
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    def alone() -> float:
        found = 0.0
        for document in words.split(list(lengths), 1):
            loss = twin(input_ids=document, labels=document).loss * ((document.shape[1] - 1) / counted)
            loss.backward()
            found += float(loss.detach())
        twin.zero_grad()
        return found

    return Duel(f"{name} Llama, {len(lengths)} documents", packed, alone, DOCUMENT_BAR)


def duels_table(duels: Sequence[Duel], rounds: int) -> Table:
    """A row a duel."""
    note = (
        f"Forward and backward. Median of {rounds} rounds, both in turn in each. "
        f"{torch.get_num_threads()} threads. Apart: relative difference of the losses."
    )
    columns = ("what", "zero_ext ms", "peer ms", "ratio", "95% interval", "bar", "met", "apart")
    table = Table("Time", columns, note=note)
    for duel in duels:
        found = duel.figures()
        ratio = found["ratio"]
        table.rows.append(
            [
                duel.name,
                f"{median(duel.own_seconds) * 1e3:.0f}",
                f"{median(duel.peer_seconds) * 1e3:.0f}",
                f"{ratio['median']:.3f}",
                f"{ratio['low']:.2f}–{ratio['high']:.2f}",
                f"≤ {duel.bar:.2f}",
                "yes" if found["met"] else "NO",
                f"{duel.apart:.1e}",
            ]
        )
    return table


def main(
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a step.")] = 8192,
    words: Annotated[int, typer.Option(min=2, help="Words of the head.")] = 32768,
    width: Annotated[int, typer.Option(min=1, help="Width of the head.")] = 1024,
    documents: Annotated[int, typer.Option(min=2, help="Documents of a packed row.")] = 12,
    model: Annotated[str, typer.Option(help="The Llama that trains on documents.")] = "34m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each yields one ratio.")] = 9,
) -> None:
    """Measure both; write the result."""
    console = terminal()
    duels, memory = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        head = head_of(tokens, words, width, dtype)
        title = str(dtype)[6:]
        memory[title] = {each.__name__: memory_of(each, head) for each in (chunked, plain)}
        peers = (
            {"torch's pair": narrow}
            if dtype == torch.float32
            else {"torch's pair": narrow, "logits in float32": plain}
        )
        for name, peer in peers.items():
            call = differentiated(chunked, head)
            duels.append(Duel(f"loss, {title}, against {name}", call, differentiated(peer, head), LOSS_BAR))
    lengths = document_lengths(tokens, documents, seed=4)
    duels += [attention_duel(tokens, lengths, dtype) for dtype in (torch.float32, torch.bfloat16)]
    duels.append(model_duel(model, tokens, lengths))
    for duel in duels:
        duel.run(rounds)
        console.print(duel.figures()["ratio"], highlight=False)
    note = (
        f"{tokens:,} tokens, {words:,} words, width {width}. Resident memory beyond inputs and gradients. "
        f"Bar: {MEMORY_BAR:.2f} times the chunks' budget of {megabytes(CHUNK_BYTES)} MB."
    )
    table = Table("Peak of the loss, MB", ("dtype", "zero_ext", "logits in float32", "met"), note=note)
    met = {title: found["chunked"] <= MEMORY_BAR * CHUNK_BYTES for title, found in memory.items()}
    for title, found in memory.items():
        row = [megabytes(found["chunked"]), megabytes(found["plain"]), "yes" if met[title] else "NO"]
        table.rows.append([title, *row])
    sizes = {"tokens": tokens, "words": words, "width": width, "documents": lengths, "model": model}
    results = [duel.figures() for duel in duels]
    data = {"environment": describe(), **sizes, "results": results, "memory": memory, "memory_met": met}
    missed = [f"{each['name']}: a bar is missed" for each in results if not each["met"]]
    missed += [f"peak of the loss in {title}: the bar is missed" for title, good in met.items() if not good]
    conclude(console, "long_context", "Long contexts", [duels_table(duels, rounds), table], data, missed)


if __name__ == "__main__":
    typer.run(main)
