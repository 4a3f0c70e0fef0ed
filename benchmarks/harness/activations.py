"""Bytes that the activations of a forward keep resident until backward, as the allocator holds them."""

from dataclasses import replace

import torch
from torch import nn

from benchmarks.harness.process_memory import resident_bytes, return_free_pages
from benchmarks.harness.shapes import BATCH_SIZE, SEQUENCE_LENGTH, LlamaShape, build_model

PROBE_LAYERS = 3
HEAP_LIMIT = 31 * 2**20  # bytes; what a training process has freed long before its first step


def activation_bytes(shape: LlamaShape, length: int = SEQUENCE_LENGTH) -> int:
    """Resident growth of the forward of one micro-batch in PyTorch alone, parameters left out.

    Measured on a few layers, which are alike, and carried on to all of them. What autograd saves is less:
    glibc keeps freed temporaries between the tensors that stay.
    """
    torch.empty(HEAP_LIMIT, dtype=torch.uint8)  # once freed, glibc puts tensors up to its size on the heap
    with torch.device("meta"):  # values do not matter, and to draw them takes long
        model = build_model(replace(shape, layers=PROBE_LAYERS))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after_layer: list[int] = []

    def note(module: nn.Module, arguments: object, output: object) -> None:
        after_layer.append(resident_bytes())

    for layer in model.get_submodule("model.layers").children():
        layer.register_forward_hook(note)
    tokens = torch.zeros(BATCH_SIZE, length, dtype=torch.int64)
    return_free_pages()
    before = resident_bytes()
    loss = model(input_ids=tokens, labels=tokens).loss
    grown = resident_bytes() - before
    del loss
    a_layer = (after_layer[-1] - after_layer[0]) // (PROBE_LAYERS - 1)
    return grown + (shape.layers - PROBE_LAYERS) * a_layer
