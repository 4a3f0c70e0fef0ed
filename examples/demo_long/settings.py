"""Every number of the demonstration in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo.settings import ModelShape


@dataclass(frozen=True)
class LongSettings(ModelShape):
    """A byte-level Llama of about 3 million parameters that sees 16,384 bytes of text at once.

    Attributes:
        steps: optimizer steps, of one window each.
        dense_steps: steps of torch's flash attention over everything, for its time alone.
        held_out_windows: windows that the held-out loss is taken over, before and after.
        block, num_local_blocks: of the layout, of mode fixed and unidirectional.
        cap_bytes: the cap is what interpreter and libraries take, plus this much.
        loss_bar: the held-out loss must end below this many nats per byte.
        time_limit_seconds: a run that takes longer is ended, and the demonstration has failed.
    """

    hidden_size: int = 256
    layers: int = 4
    feed_forward_size: int = 704
    heads: int = 4
    window: int = 16_384
    steps: int = 30
    dense_steps: int = 1
    held_out_windows: int = 2
    learning_rate: float = 3e-3
    block: int = 64
    num_local_blocks: int = 8
    cap_bytes: int = 3 * 2**30
    loss_bar: float = 3.2
    time_limit_seconds: float = 280.0

    @property
    def layout(self) -> dict[str, Any]:
        """The `sparse_attention` section."""
        return {
            "mode": "fixed",
            "block": self.block,
            "num_local_blocks": self.num_local_blocks,
            "attention": "unidirectional",
        }
