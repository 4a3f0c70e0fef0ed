"""zero_ext stages 0 to 3: `prepare`, then the plain loop."""

import torch

import zero_ext
from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import CLIP_NORM, adamw, loss_of, nvme_folder
from zero_ext.zero import engine_of


class ZeroExtTrainer:
    """The loop of the README: the optimizer is the user's AdamW, clipping is configured; ``tiers`` by state
    kind; ``tiles`` cut embedding and output layer, 0 leaves them whole."""

    def __init__(self, shape: Shape, stage: int, tiles: int = 0, **tiers: str) -> None:
        cut = {"Embedding": tiles, "lm_head": tiles} if tiles else {}
        paths = {"nvme_paths": [nvme_folder()]} if "nvme" in tiers.values() else {}
        model = build_model(shape)
        self.model, self.optimizer = zero_ext.prepare(
            model,
            adamw(list(model.parameters())),
            config={
                "stage": stage,
                "gradient_clipping": CLIP_NORM,
                "units": {"persistence_threshold": 0, "tiles": cut},
                "offload": {**tiers, **paths},
            },
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def gradient_norm(self) -> float:
        return float(engine_of(self.model).grad_norm)

    def staging_bytes(self) -> dict[str, int]:
        engine = engine_of(self.model)
        return {"host": engine.tiers.staging_bytes(), "device": engine.pool.total_bytes}

    def ledger_bytes(self) -> dict[str, int]:
        return dict(engine_of(self.model).ledger())
