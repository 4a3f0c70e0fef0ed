"""What leaving blocks out costs in quality: a byte language model with sparse attention against dense.

Run from the repository root: python -m benchmarks.long_quality [--steps 300] [--window 1024]
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from zero_ext.attention import build_layout
from zero_ext.config import SparseAttentionConfig
from zero_ext.integrations.transformers import sparsify_attention

BAR = 1.02
BATCH, WARM_UP, LEARNING_RATE, HELD_OUT = 4, 20, 2e-3, 16
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
LAYOUTS = {
    "fixed": SparseAttentionConfig(mode="fixed", block=32, num_local_blocks=4, attention="unidirectional"),
    "bigbird": SparseAttentionConfig(
        mode="bigbird", block=32, num_random_blocks=2, num_sliding_window_blocks=7, attention="unidirectional"
    ),
}


@dataclass(frozen=True)
class Run:
    """One training: held-out loss in nats per byte at some steps, and seconds a step."""

    name: str
    seed: int
    held_out: tuple[float, ...]
    seconds: float


def documents() -> Iterator[tuple[str, str]]:
    """Docstrings of the standard library's single modules, a document each, and the language topics."""
    yield from topics.items()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        yield path.name, "\n".join(text for text in texts if text)


def corpus() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, uint8; whole documents are held out by a hash of their names."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for name, text in documents():
        held_out = hashlib.sha256(name.encode()).digest()[0] % 12 == 0
        sides[held_out].append(text.encode() + b"\0")
    training, held = (torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides)
    return training, held


def train(name: str, seed: int, steps: int, window: int, console: Console) -> Run:
    """The same weights and windows for every name; evaluated at four places."""
    text, held = corpus()
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "max_position_embeddings": window, "pad_token_id": None, **SHAPE}
    model = LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **sizes))
    if name != "dense":
        sparsify_attention(model, LAYOUTS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(seed)
    spaced = torch.arange(HELD_OUT) * (held.numel() - window) // HELD_OUT
    judged, losses, began = (
        torch.stack([held[p : p + window] for p in spaced]).long(),
        [],
        time.perf_counter(),
    )
    for step in range(1, steps + 1):
        starts = torch.randint(text.numel() - window, (BATCH,), generator=draw)
        ids = torch.stack([text[start : start + window] for start in starts]).long()
        factor = min(step / WARM_UP, 1.0) * (1 - 0.9 * max(0, step - WARM_UP) / steps)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step * 4 % steps < 4:
            with torch.no_grad():
                chunk_losses = [
                    model(input_ids=p, labels=p, use_cache=False).loss for p in judged.split(BATCH)
                ]
            losses.append(float(torch.stack(chunk_losses).mean()))
            console.print(f"{name}, seed {seed}, step {step}: {losses[-1]:.4f}", highlight=False)
    return Run(name, seed, tuple(losses), (time.perf_counter() - began) / steps)


def main(
    steps: Annotated[int, typer.Option(min=4, help="Of each training.")] = 300,
    window: Annotated[int, typer.Option(min=64, help="Bytes of a sequence.")] = 1024,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with other weights and data.")] = 1,
) -> None:
    """Train with every layout and dense; write the result."""
    console = terminal()
    runs = [
        train(name, seed, steps, window, console) for seed in range(seeds) for name in ("dense", *LAYOUTS)
    ]
    table = Table(
        "Held-out loss at equal steps",
        (
            "attention",
            "blocks",
            "seed",
            "a quarter",
            "half",
            "three quarters",
            "end",
            "against dense",
            "s/step",
        ),
        note=f"Nats per byte of Python's documentation, documents held out. {steps} steps of {BATCH} × "
        f"{window} bytes, Llama of {SHAPE['num_hidden_layers']} layers, hidden {SHAPE['hidden_size']}, "
        f"fp32; the same weights and data on all sides. Bar: at most {BAR:g} times dense.",
    )
    ratios: dict[str, float] = {}
    for run in runs:
        dense = next(other for other in runs if (other.name, other.seed) == ("dense", run.seed))
        ratio = run.held_out[-1] / dense.held_out[-1]
        ratios[run.name] = max(ratio, ratios.get(run.name, 0.0))
        share = 1.0
        if run.name != "dense":
            blocks = -(-window // LAYOUTS[run.name].block)
            share = build_layout(LAYOUTS[run.name], 1, window).blocks / (blocks * (blocks + 1) / 2)
        losses = [f"{loss:.4f}" for loss in run.held_out]
        table.rows.append(
            [run.name, f"{share:.0%}", str(run.seed), *losses, f"{ratio:.4f}", f"{run.seconds:.2f}"]
        )
    met = all(ratio <= BAR for ratio in ratios.values())
    data: dict[str, Any] = {"environment": describe(), "bar": BAR, "met": met, "ratios": ratios}
    data["runs"] = [asdict(run) for run in runs]
    failures = [
        f"{name}: {ratio:.4f} times the loss of dense attention, bar {BAR:g}"
        for name, ratio in ratios.items()
        if ratio > BAR
    ]
    conclude(console, "long_quality", "Quality of sparse attention", [table], data, failures)


if __name__ == "__main__":
    typer.run(main)
