"""State-space models, linear recurrences and memories."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import generator, mean_square, next_token, sequences, tokens

WIDTH, LENGTH, VOCABULARY = 8, 7, 19


class S4D(nn.Module):
    """Complex parameters are kept as real pairs and viewed as complex in forward."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.C = nn.Parameter(torch.view_as_real(torch.randn(WIDTH, n, dtype=torch.cfloat)))
        self.register("log_dt", torch.rand(WIDTH) * 2 - 4)
        self.register("log_A_real", torch.log(0.5 * torch.ones(WIDTH, n)))
        self.register("A_imag", math.pi * torch.arange(n).expand(WIDTH, n).contiguous())
        self.D = nn.Parameter(torch.randn(WIDTH))

    def register(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor))
        getattr(self, name)._optim = {"weight_decay": 0.0}

    def forward(self, u):
        length = u.shape[1]
        C = torch.view_as_complex(self.C)
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dtA = A * torch.exp(self.log_dt).unsqueeze(-1)
        K = dtA.unsqueeze(-1) * torch.arange(length)
        K = 2 * torch.einsum("hn,hnl->hl", C * (torch.exp(dtA) - 1.0) / A, torch.exp(K)).real
        u_f = torch.fft.rfft(u.transpose(1, 2), n=2 * length)
        y = torch.fft.irfft(torch.fft.rfft(K, n=2 * length) * u_f, n=2 * length)[..., :length]
        return y.transpose(1, 2) + u * self.D


class LRU(nn.Module):
    """Parameters of a complex dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.nu_log = nn.Parameter(torch.log(torch.rand(WIDTH) + 0.1))
        self.theta_log = nn.Parameter(torch.log(torch.rand(WIDTH) + 0.1))
        self.B = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH)
        self.C = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH)

    def forward(self, u):
        lam = torch.exp(torch.complex(-torch.exp(self.nu_log), torch.exp(self.theta_log)))
        x, ys = torch.zeros(u.shape[0], WIDTH, dtype=torch.cfloat), []
        for t in range(u.shape[1]):
            x = lam * x + u[:, t].to(torch.cfloat) @ self.B.mT
            ys.append((x @ self.C.T).real)
        return torch.stack(ys, 1)


class Mamba(nn.Module):
    """A selective scan; the depthwise convolution's weight is rearranged and used through ``F.conv1d``."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.x_proj = nn.Linear(WIDTH, 2 + 2 * 4, bias=False)
        self.dt_proj = nn.Linear(2, WIDTH)
        dt = torch.exp(torch.rand(WIDTH) * 2 - 4)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.dt_proj.bias._no_reinit = True
        self.A_log = nn.Parameter(torch.log(torch.arange(1, 5).float().repeat(WIDTH, 1)))
        self.A_log._no_weight_decay = True
        self.D = nn.Parameter(torch.ones(WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        x, z = self.in_proj(hidden).chunk(2, -1)
        w = self.conv1d.weight.squeeze(1).unsqueeze(1)
        x = F.silu(F.conv1d(x.transpose(1, 2), w, self.conv1d.bias, padding=2, groups=WIDTH)[..., :-2])
        x = x.transpose(1, 2)
        dt, B, C = torch.split(self.x_proj(x), [2, 4, 4], dim=-1)
        dt = F.softplus(dt @ self.dt_proj.weight.t() + self.dt_proj.bias.float())
        A = -torch.exp(self.A_log.float())
        h, ys = x.new_zeros(x.shape[0], WIDTH, 4), []
        for t in range(x.shape[1]):
            h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
            ys.append((h * C[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(ys, 1) + x * self.D) * F.silu(z))


class Residual(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.norm = mixer, nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class TimeMix(nn.Module):
    """RWKV-4: time shift by padding, weights for each channel, a numerically stable recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.time_decay = nn.Parameter(torch.linspace(-5, 3, WIDTH))
        self.time_first = nn.Parameter(torch.ones(WIDTH) * math.log(0.3))
        self.time_mix_k, self.time_mix_v, self.time_mix_r = (
            nn.Parameter(torch.rand(1, 1, WIDTH)) for _ in range(3)
        )
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        xx = self.time_shift(x)
        k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + xx * (1 - self.time_mix_v))
        r = torch.sigmoid(self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r)))
        w, u = -torch.exp(self.time_decay), self.time_first
        aa = bb = torch.zeros_like(x[:, 0])
        pp, out = aa - 1e38, []
        for t in range(x.shape[1]):
            ww = u + k[:, t]
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out.append((e1 * aa + e2 * v[:, t]) / (e1 * bb + e2))
            ww = pp + w
            p = torch.maximum(ww, k[:, t])
            e1, e2 = torch.exp(ww - p), torch.exp(k[:, t] - p)
            aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, p
        return self.output(r * torch.stack(out, 1))


class RWKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.ln0 = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([Residual(TimeMix()), Residual(TimeMix())])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        # The first norm is applied to the whole embedding, as RWKV's inference code does.
        x = F.embedding(ids, self.ln0(self.emb.weight))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Hyena(nn.Module):
    """Long filters from a small network over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, WIDTH))
        self.deltas = nn.Parameter(torch.linspace(0.1, 1, WIDTH)[None], requires_grad=False)
        self.proj = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        n = x.shape[1]
        t = torch.linspace(0, 1, n)[:, None]
        h = self.filter(torch.cat([t, torch.sin(6 * t), torch.cos(6 * t)], -1)) * torch.exp(-t * self.deltas)
        q, k, v = self.proj(x).chunk(3, -1)
        kv = torch.fft.rfft((k * v).transpose(1, 2), n=2 * n) * torch.fft.rfft(h.t(), n=2 * n)
        return q * torch.fft.irfft(kv, n=2 * n)[..., :n].transpose(1, 2)


class NeuralTuringMachine(nn.Module):
    """Memory and initial states are parameters that are repeated for the batch."""

    def __init__(self, slots: int = 5) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(slots, 4) * 0.3)
        self.init_r = nn.Parameter(torch.randn(1, 4) * 0.02)
        self.controller = nn.LSTMCell(WIDTH + 4, 10)
        self.h0, self.c0 = nn.Parameter(torch.randn(1, 10) * 0.05), nn.Parameter(torch.randn(1, 10) * 0.05)
        self.heads = nn.ModuleDict({"read": nn.Linear(10, 5), "write": nn.Linear(10, 5 + 8)})
        self.out = nn.Linear(14, WIDTH)

    def address(self, memory: torch.Tensor, head_outputs: torch.Tensor) -> torch.Tensor:
        k, beta = head_outputs[:, :4], F.softplus(head_outputs[:, 4:5])
        return F.softmax(beta * F.cosine_similarity(memory + 1e-16, k[:, None] + 1e-16, dim=-1), dim=1)

    def forward(self, x):
        b = x.shape[0]
        memory, read = self.memory.clone().repeat(b, 1, 1), self.init_r.expand(b, -1)
        h, c = self.h0.repeat(b, 1), self.c0.repeat(b, 1)
        for t in range(x.shape[1]):
            h, c = self.controller(torch.cat([x[:, t], read], 1), (h, c))
            read = torch.bmm(self.address(memory, self.heads["read"](h)).unsqueeze(1), memory).squeeze(1)
            o = self.heads["write"](h)
            w = self.address(memory, o[:, :5]).unsqueeze(-1)
            memory = memory * (1 - w * torch.sigmoid(o[:, None, 5:9])) + w * o[:, None, 9:]
        return self.out(torch.cat([h, read], 1))


class MemoryNetwork(nn.Module):
    """Adjacent tying: the output embedding of a hop is the input embedding of the next one."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(3):
            C = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
            C.weight.data.normal_(0, 0.1)
            self.add_module(f"C_{layer}", C)
        self.C = [getattr(self, f"C_{layer}") for layer in range(3)]

    def forward(self, ids):
        u = self.C[0](ids[:, 0])
        for layer in range(2):
            p = torch.softmax((self.C[layer](ids) * u[:, None]).sum(-1), 1)
            u = u + (p.unsqueeze(-1) * self.C[layer + 1](ids)).sum(1)
        return (u @ self.C[2].weight.transpose(0, 1))[:, None].expand(-1, ids.shape[1], -1)


class Hopfield(nn.Module):
    """Stored patterns are parameters; lookups of a product-key memory with top-k and ``F.embedding_bag``."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 4, WIDTH // 2))
        self.values = nn.EmbeddingBag(16, WIDTH, mode="sum")
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.query(x).view(-1, 2, WIDTH // 2)
        s, i = torch.einsum("bhd,hkd->bhk", q, self.keys).topk(2, dim=-1)
        scores = (s[:, 0, :, None] + s[:, 1, None, :]).flatten(1)
        index = (i[:, 0, :, None] * 4 + i[:, 1, None, :]).flatten(1)
        return self.values(index, per_sample_weights=scores.softmax(-1)).view_as(x) + x


def sequence_case(name: str, mixer: Any, expected: str = "equal") -> Case:
    """Return a case of two residual layers of a mixer."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, WIDTH), Residual(mixer()), Residual(mixer()), nn.Linear(WIDTH, 3))

    return Case(f"own/state_space/{name}", build, sequences(LENGTH, 5), mean_square, expected=expected)


def wide_batch(step: int) -> torch.Tensor:
    """Return sequences [3, 5, width]."""
    return torch.randn(3, 5, WIDTH, generator=generator(step))


CASES = [
    *(
        sequence_case(n, m)
        for n, m in (
            ("s4d", S4D),
            ("mamba", Mamba),
            ("hyena", Hyena),
            ("product-keys", Hopfield),
        )
    ),
    Case("own/state_space/rwkv", RWKV, tokens(VOCABULARY, LENGTH), next_token),
    Case("own/state_space/turing-machine", NeuralTuringMachine, wide_batch, mean_square),
    Case("own/state_space/memory-network", MemoryNetwork, tokens(VOCABULARY, LENGTH), next_token),
]
