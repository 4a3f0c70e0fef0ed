"""Vision transformers, mixers and models of views and coordinates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import Case
from tests.zoo.inputs import classification, features, images, mean_square

WIDTH = 12


class Attention(nn.Module):
    def __init__(self, dim: int = WIDTH, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        # BEiT: the key has no bias, so a zero tensor stands for it.
        qkv_bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, qkv_bias)
        q, k, v = qkv.reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim: int = WIDTH, init_values: float | None = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, dim))
        if init_values is not None:
            self.gamma_1 = nn.Parameter(init_values * torch.ones(dim), requires_grad=True)
            self.gamma_2 = nn.Parameter(init_values * torch.ones(dim), requires_grad=True)
        else:
            self.gamma_1 = self.gamma_2 = None

    def forward(self, x):
        if self.gamma_1 is None:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_patches = 4
        self.proj = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """timm's layout: class token and positions are parameters of the root, sliced and interpolated."""

    def __init__(self, distilled: bool = False, interpolate: bool = False) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.dist_token = nn.Parameter(torch.zeros(1, 1, WIDTH)) if distilled else None
        self.pos_embed = nn.Parameter(torch.zeros(1, (2 if distilled else 1) + 4, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.head_dist = nn.Linear(WIDTH, 5) if distilled else None
        self.interpolate = interpolate
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def interpolate_pos_encoding(self, n: int) -> torch.Tensor:
        patches = self.pos_embed[:, 1:].reshape(1, 2, 2, WIDTH).permute(0, 3, 1, 2)
        size = int(math.sqrt(n))
        patches = F.interpolate(patches, size=(size, size), mode="bicubic", align_corners=False)
        return torch.cat((self.pos_embed[:, 0].unsqueeze(0), patches.flatten(2).transpose(1, 2)), dim=1)

    def forward_features(self, x):
        x = self.patch_embed(x)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        if self.interpolate:
            x = torch.cat((cls, x), dim=1) + self.interpolate_pos_encoding(x.shape[1])
        elif self.dist_token is None:
            x = torch.cat((cls, x), dim=1) + self.pos_embed
        else:
            x = torch.cat((cls, self.dist_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward(self, x):
        x = self.forward_features(x)
        if self.head_dist is None:
            return self.head(x[:, 0])
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2


class MaskedAutoencoder(nn.Module):
    """MAE: random masking, a mask token repeated, fixed positions as a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(12, WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.1, requires_grad=False)
        self.encoder = nn.ModuleList([Block(init_values=None)])
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.decoder_pos_embed = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.1, requires_grad=False)
        self.decoder = nn.ModuleList([Block(init_values=None)])
        self.pred = nn.Linear(WIDTH, 12)

    def forward(self, imgs):
        target = imgs.reshape(-1, 3, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 12)
        x = self.patch_embed(target) + self.pos_embed
        ids_shuffle = torch.rand(x.shape[0], 16).argsort(dim=1)
        ids_restore = ids_shuffle.argsort(dim=1)
        keep = ids_shuffle[:, :6].unsqueeze(-1)
        x = torch.gather(x, 1, keep.repeat(1, 1, WIDTH))
        for blk in self.encoder:
            x = blk(x)
        x = torch.cat([x, self.mask_token.repeat(x.shape[0], 10, 1)], dim=1)
        x = torch.gather(x, 1, ids_restore.unsqueeze(-1).repeat(1, 1, WIDTH)) + self.decoder_pos_embed
        for blk in self.decoder:
            x = blk(x)
        return ((self.pred(x) - target) ** 2).mean()


class WindowAttention(nn.Module):
    """Swin: a table of relative biases, indexed by a buffer."""

    def __init__(self, dim: int, window: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        coords = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += window - 1
        relative[:, :, 1] += window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1) * C**-0.5
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            attn = attn.view(-1, mask.shape[0], self.heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.heads, N, N)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class SwinBlock(nn.Module):
    def __init__(self, dim: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.shift = shift
        self.register_buffer("attn_mask", torch.zeros(4, 4, 4) if shift else None)

    def forward(self, x):
        B, H, W, C = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm1(x)
        y = y.view(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, C)
        y = self.attn(y, self.attn_mask)
        y = y.view(B, H // 2, W // 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + y
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        self.layers = nn.ModuleList([SwinBlock(WIDTH, 0), SwinBlock(WIDTH, 1)])
        self.reduction = nn.Linear(4 * WIDTH, 2 * WIDTH, bias=False)
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        x = torch.cat([x[:, i::2, j::2] for i, j in itertools.product((0, 1), (0, 1))], -1)
        return self.head(self.reduction(x).mean((1, 2)))


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Affine(nn.Module):
    """ResMLP's normalization: alpha and beta, through ``torch.addcmul``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x):
        return torch.addcmul(self.beta, self.alpha, x)


class SpatialTransformer(nn.Module):
    """A localization net whose last bias is set by ``bias.data.copy_``."""

    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(36, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.fc_loc[2].weight.data.normal_(0, 0.01)
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.head = nn.Linear(192, 5)

    def forward(self, x):
        theta = self.fc_loc(self.localization(x).view(-1, 36)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))


class NeRF(nn.Module):
    """A skip in the middle of a ModuleList, frequencies computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.pts_linears = nn.ModuleList([nn.Linear(15, 16), nn.Linear(16, 16), nn.Linear(31, 16)])
        self.alpha_linear, self.rgb_linear = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, pts):
        embedded = torch.cat([pts] + [f(pts * 2.0**i) for i in range(2) for f in (torch.sin, torch.cos)], -1)
        h = embedded
        for i, layer in enumerate(self.pts_linears):
            h = F.relu(layer(h))
            if i == 1:
                h = torch.cat([embedded, h], -1)
        weights = 1 - torch.exp(-F.relu(self.alpha_linear(h)))
        return (weights * torch.sigmoid(self.rgb_linear(h))).sum(0)


class Siren(nn.Module):
    """Sine layers that initialize their weights under ``no_grad`` by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(a, b) for a, b in ((2, 16), (16, 16), (16, 3))])
        with torch.no_grad():
            for i, layer in enumerate(self.net):
                bound = 1 / 2 if i == 0 else math.sqrt(6 / 16) / 30
                layer.weight.uniform_(-bound, bound)

    def forward(self, coords):
        for layer in self.net[:-1]:
            coords = torch.sin(30 * layer(coords))
        return self.net[-1](coords)


class FourierFeatures(nn.Module):
    """The random matrix is a frozen parameter, as often as it is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.B = nn.Parameter(torch.randn(2, 6) * 2, requires_grad=False)
        self.mlp = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, v):
        x = 2 * math.pi * v @ self.B
        return self.mlp(torch.cat([x.sin(), x.cos()], -1))


class HashGrid(nn.Module):
    """Instant-NGP: several tables in a ParameterList, looked up by a hash."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.rand(16, 2) * 0.1) for _ in range(3)])
        self.mlp = nn.Linear(6, 3)

    def forward(self, x):
        found = []
        for level, table in enumerate(self.tables):
            cell = torch.floor(x * 2 ** (level + 1)).long()
            found.append(table[(cell[:, 0] ^ (cell[:, 1] * 2_654_435_761)) % 16])
        return self.mlp(torch.cat(found, -1))


def vision(name: str, build: Any, **more: Any) -> Case:
    """Return a case of an image classifier."""
    return Case(f"own/vision_attention/{name}", build, **({"batch": images(), "loss": classification} | more))


def on_images(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Return the loss that the model computes of the images."""
    return model(inputs[0])


CASES = [
    vision("vit", ViT),
    vision("vit-distilled", lambda: ViT(distilled=True)),
    vision("vit-interpolated", lambda: ViT(interpolate=True)),
    vision("masked-autoencoder", MaskedAutoencoder, loss=on_images),
    vision("swin", Swin),
    vision(
        "mixer",
        lambda: nn.Sequential(
            PatchEmbed(), MixerBlock(), MixerBlock(), nn.Flatten(), nn.Linear(4 * WIDTH, 5)
        ),
    ),
    vision(
        "resmlp",
        lambda: nn.Sequential(
            PatchEmbed(),
            Affine(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            Affine(WIDTH),
            nn.Flatten(),
            nn.Linear(48, 5),
        ),
    ),
    vision("spatial-transformer", SpatialTransformer),
    *(
        Case(f"own/vision_attention/{name}", build, features(size, 6), mean_square)
        for name, build, size in (
            ("nerf", NeRF, 3),
            ("siren", Siren, 2),
            ("fourier-features", FourierFeatures, 2),
            ("hash-grid", HashGrid, 2),
        )
    ),
]
