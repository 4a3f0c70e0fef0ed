"""Two views, momentum encoders and contrastive losses."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case, TrainingState
from tests.zoo.inputs import generator, own_loss


def views(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two noisy views [6, 10] of the same data."""
    random = generator(step)
    x = torch.randn(6, 10, generator=random)
    return x + 0.1 * torch.randn(6, 10, generator=random), x + 0.1 * torch.randn(6, 10, generator=random)


def backbone() -> nn.Sequential:
    """Return an encoder with batch norm."""
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 12))


def projector(inner: int = 16) -> nn.Sequential:
    """Return a projection head."""
    return nn.Sequential(
        nn.Linear(12, inner), nn.BatchNorm1d(inner), nn.ReLU(inplace=True), nn.Linear(inner, 8)
    )


class SimCLR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = backbone(), projector()

    def forward(self, views):
        z = F.normalize(self.head(self.encoder(torch.cat(views, dim=0))), dim=1)
        n = z.shape[0]
        sim = (z @ z.T / 0.5).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(sim, (torch.arange(n) + n // 2) % n)


class BYOL(nn.Module):
    """The target moves inside forward, by assigning ``data`` or in place under no_grad, or from the loop."""

    def __init__(self, update: str) -> None:
        super().__init__()
        self.online_encoder = nn.Sequential(backbone(), projector())
        self.target_encoder = copy.deepcopy(self.online_encoder)
        for p in self.target_encoder.parameters():
            p.requires_grad = False
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.update = update

    @torch.no_grad()
    def update_target(self) -> None:
        for q, k in zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True):
            if self.update == "data":
                k.data = k.data * 0.9 + q.data * (1.0 - 0.9)
            else:
                k.mul_(0.9).add_(q.detach(), alpha=0.1)

    def forward(self, views):
        if self.training and self.update in ("data", "in-place"):
            self.update_target()
        online = [self.predictor(self.online_encoder(v)) for v in views]
        with torch.no_grad():
            target = [self.target_encoder(v).detach() for v in views]
        return sum(2 - 2 * F.cosine_similarity(online[i], target[1 - i]).mean() for i in (0, 1))


class MoCo(nn.Module):
    """A queue of keys in a buffer with its pointer, both moved in forward."""

    def __init__(self, m: float = 0.9) -> None:
        super().__init__()
        self.m = m
        self.encoder_q = nn.Sequential(backbone(), nn.Linear(12, 8))
        self.encoder_k = nn.Sequential(backbone(), nn.Linear(12, 8))
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, 24), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: torch.Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.queue.shape[1]

    def forward(self, views):
        q = F.normalize(self.encoder_q(views[0]), dim=1)
        with torch.no_grad():
            if self.training:
                self._momentum_update_key_encoder()
            order = torch.randperm(views[1].shape[0])
            k = F.normalize(self.encoder_k(views[1][order]), dim=1)[order.argsort()]
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        logits = torch.cat([positive, torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])], dim=1)
        if self.training:
            self._dequeue_and_enqueue(k)
        return F.cross_entropy(logits / 0.2, torch.zeros(logits.shape[0], dtype=torch.long))


class DINOHead(nn.Module):
    """A last layer with weight norm whose gain is frozen at one."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 14, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class DINO(nn.Module):
    """Student, teacher and a moving center; the teacher follows in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(backbone(), DINOHead())
        self.teacher = nn.Sequential(backbone(), DINOHead())
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, 14))

    def forward(self, views):
        student = [F.log_softmax(self.student(v) / 0.1, dim=-1) for v in views]
        with torch.no_grad():
            outputs = [self.teacher(v) for v in views]
            teacher = [F.softmax((o - self.center) / 0.04, dim=-1) for o in outputs]
            if self.training:
                self.center = self.center * 0.9 + torch.cat(outputs).mean(0, keepdim=True) * 0.1
        return sum((-teacher[i] * student[1 - i]).sum(-1).mean() for i in (0, 1))


class SwAV(nn.Module):
    """Prototypes are normalized in the loop before each forward; codes come from Sinkhorn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = backbone()
        self.prototypes = nn.Linear(12, 6, bias=False)

    def forward(self, views):
        scores = [self.prototypes(F.normalize(self.encoder(v), dim=1)) for v in views]
        with torch.no_grad():
            codes = [self.sinkhorn(s) for s in scores]
        return -sum((codes[i] * F.log_softmax(scores[1 - i] / 0.1, dim=1)).sum(1).mean() for i in (0, 1))

    @staticmethod
    def sinkhorn(out: torch.Tensor) -> torch.Tensor:
        q = torch.exp(out / 0.05).t()
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(dim=1, keepdim=True) * q.shape[0]
            q /= q.sum(dim=0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).t()


class BarlowTwins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projector = backbone(), projector()
        self.bn = nn.BatchNorm1d(8, affine=False)

    def forward(self, views):
        z1, z2 = (self.projector(self.backbone(v)) for v in views)
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(6)
        on = torch.diagonal(c).add(-1).pow(2).sum()
        off = c.flatten()[:-1].view(7, 9)[:, 1:].flatten().pow(2).sum()
        return on + 0.005 * off


class CLIP(nn.Module):
    """Towers with projections that are parameters of the root, and a temperature of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = backbone(), backbone()
        self.visual_projection = nn.Parameter(12**-0.5 * torch.randn(12, 8))
        self.text_projection = nn.Parameter(torch.empty(12, 8))
        nn.init.normal_(self.text_projection, std=12**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def encode_image(self, x):
        return self.visual(x) @ self.visual_projection

    def encode_text(self, x):
        return self.text(x) @ self.text_projection

    def forward(self, views):
        image, text = self.encode_image(views[0]), self.encode_text(views[1])
        image, text = (f / f.norm(dim=1, keepdim=True) for f in (image, text))
        logits = self.logit_scale.exp() * image @ text.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def ordinary_step(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Make a step of the model's own loss."""
    loss = state.model(inputs)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    return loss


def clamped_naively(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Clamp CLIP's temperature through ``data``."""
    loss = ordinary_step(state, inputs)
    state.model.logit_scale.data.clamp_(0, 2.5)
    return loss


def clamped_gathered(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Clamp CLIP's temperature inside ``gathered``."""
    loss = ordinary_step(state, inputs)
    with state.gathered(state.model.logit_scale, modifier_rank=0), torch.no_grad():
        state.model.logit_scale.clamp_(0, 2.5)
    return loss


def target_in_loop(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move the target network after the step."""
    loss = ordinary_step(state, inputs)
    state.model.update_target()
    return loss


def target_gathered(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move the target network after the step, inside ``gathered``."""
    loss = ordinary_step(state, inputs)
    with state.gathered(state.model, modifier_rank=0):
        state.model.update_target()
    return loss


def teacher_follows(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move DINO's teacher by ``data.mul_().add_()``, and leave the last layer alone in the first step."""
    loss = state.model(inputs)
    state.optimizer.zero_grad()
    loss.backward()
    if state.step_number == 0:
        for name, p in state.model.student.named_parameters():
            if "last_layer" in name:
                p.grad = None
    state.optimizer.step()
    with torch.no_grad():
        for q, k in zip(state.model.student.parameters(), state.model.teacher.parameters(), strict=True):
            k.data.mul_(0.9).add_((1 - 0.9) * q.detach().data)
    return loss


def teacher_follows_gathered(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move DINO's teacher inside ``gathered``."""
    loss = ordinary_step(state, inputs)
    with state.gathered(state.model, modifier_rank=0), torch.no_grad():
        for q, k in zip(state.model.student.parameters(), state.model.teacher.parameters(), strict=True):
            k.mul_(0.9).add_((1 - 0.9) * q.detach())
    return loss


def prototypes_normalized(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Normalize SwAV's prototypes by copying into the weight before the step."""
    with torch.no_grad():
        w = state.model.prototypes.weight.data.clone()
        w = F.normalize(w, dim=1, p=2)
        state.model.prototypes.weight.copy_(w)
    return ordinary_step(state, inputs)


def prototypes_gathered(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Normalize SwAV's prototypes inside ``gathered``."""
    with state.gathered(state.model.prototypes, modifier_rank=0), torch.no_grad():
        weight = state.model.prototypes.weight
        weight.copy_(F.normalize(weight.data.clone(), dim=1, p=2))
    return ordinary_step(state, inputs)


def view_case(name: str, build: Any, step: Any = None) -> Case:
    """Return a case of two views."""
    return Case(f"own/self_supervised/{name}", build, views, own_loss, step=step)


CASES = [
    view_case("simclr", SimCLR),
    view_case("byol-data", lambda: BYOL("data")),
    view_case("byol-in-place", lambda: BYOL("in-place")),
    view_case("byol-in-loop", lambda: BYOL("loop"), step=target_in_loop),
    view_case("byol-gathered", lambda: BYOL("loop"), step=target_gathered),
    view_case("moco", MoCo),
    view_case("dino", DINO, step=teacher_follows),
    view_case("dino-gathered", DINO, step=teacher_follows_gathered),
    view_case("swav", SwAV, step=prototypes_normalized),
    view_case("swav-gathered", SwAV, step=prototypes_gathered),
    view_case("barlow-twins", BarlowTwins),
    view_case("clip", CLIP),
    view_case("clip-clamped", CLIP, step=clamped_naively),
    view_case("clip-clamped-gathered", CLIP, step=clamped_gathered),
]
