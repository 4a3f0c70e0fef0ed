"""Bytes of activations that a training step saves for backward."""

from dataclasses import replace

import torch

from benchmarks.harness.shapes import BATCH_SIZE, SEQUENCE_LENGTH, LlamaShape, build_model


def activation_bytes(shape: LlamaShape, length: int = SEQUENCE_LENGTH) -> int:
    """Bytes that autograd holds at the end of the forward of one micro-batch, parameters left out.

    Measured at one and at two layers, which are alike, and carried on to all of them.
    """
    one, two = (_saved_bytes(replace(shape, layers=layers), length) for layers in (1, 2))
    return one + (shape.layers - 1) * (two - one)


def _saved_bytes(shape: LlamaShape, length: int) -> int:
    with torch.device("meta"):  # values do not matter, and to make them takes long
        model = build_model(shape)
    model.to_empty(device="cpu")
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    tokens = torch.zeros(BATCH_SIZE, length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    del loss
    return sum(storage.nbytes() for storage in saved.values())
