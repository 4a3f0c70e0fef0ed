"""Two views, and networks that follow others by a moving average."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case, TrainingState, plain_step
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


class BYOL(nn.Module):
    """The target moves inside forward, by assigning ``data`` or in place under no_grad."""

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
        if self.training:
            self.update_target()
        online = [self.predictor(self.online_encoder(v)) for v in views]
        with torch.no_grad():
            target = [self.target_encoder(v).detach() for v in views]
        return sum(2 - 2 * F.cosine_similarity(online[i], target[1 - i]).mean() for i in (0, 1))


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
    return plain_step(state, own_loss, inputs)


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


def teacher_follows(state: TrainingState, inputs: Any) -> torch.Tensor:
    """Move DINO's teacher by ``data.mul_().add_()``, and leave the last layer alone in the first step."""

    def freeze(state: TrainingState) -> None:
        for name, p in state.model.student.named_parameters():
            if state.step_number == 0 and "last_layer" in name:
                p.grad = None

    loss = plain_step(state, own_loss, inputs, freeze)
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


def view_case(name: str, build: Any, step: Any = None) -> Case:
    """Return a case of two views."""
    return Case(f"own/self_supervised/{name}", build, views, own_loss, step=step)


CASES = [
    view_case("byol-data", lambda: BYOL("data")),
    view_case("byol-in-place", lambda: BYOL("in-place")),
    view_case("dino", DINO, step=teacher_follows),
    view_case("dino-gathered", DINO, step=teacher_follows_gathered),
    view_case("clip-clamped", CLIP, step=clamped_naively),
    view_case("clip-clamped-gathered", CLIP, step=clamped_gathered),
]
