"""The script that `benchmarks.tune` tunes: a small Llama on random tokens; no benchmark of its own."""

import torch

import zero_ext
from benchmarks.harness.shapes import build_model, shape_named
from zero_ext.plan import Trial

LENGTH = 128
SHAPE = "llama-256x6"


def main() -> None:
    """Trains until the trial has its steps."""
    trial, shape = Trial.current(), shape_named(SHAPE)
    model = build_model(shape, torch.float32)
    model, optimizer = zero_ext.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), trial.config)
    tokens = torch.randint(shape.vocabulary, (trial.config.batch.micro_batch_size or 1, LENGTH))
    for batch in trial.steps(tokens for _ in range(10_000)):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
