"""Networks for images: convolutions, and transformers of patches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Case
from tests.zoo.inputs import classification, images

WIDTH = 12


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's layout: stages are Sequential attributes, residual sums are made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._make_layer(8, 8, 2, 1)
        self.layer2 = self._make_layer(8, 12, 2, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(12, 5)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, inplanes: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
        layers = [BasicBlock(inplanes, planes, stride)]
        layers += [BasicBlock(planes, planes) for _ in range(blocks - 1)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, 4, 3, padding=1, bias=False)

    def bottleneck(self, *inputs):
        return self.conv(F.relu(self.norm(torch.cat(inputs, 1))))

    def forward(self, features):
        if any(f.requires_grad for f in features):
            return checkpoint(self.bottleneck, *features, use_reentrant=False)
        return self.bottleneck(*features)


class DenseNet(nn.Module):
    """Each layer reads the list of all earlier outputs, and is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.block = nn.ModuleDict({f"denselayer{i}": DenseLayer(6 + 4 * i) for i in range(3)})
        self.classifier = nn.Linear(18, 5)

    def forward(self, x):
        features = [self.stem(x)]
        for _name, layer in self.block.items():
            features.append(layer(features))
        return self.classifier(torch.cat(features, 1).mean((2, 3)))


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
    def __init__(self, dim: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, dim))
        self.gamma_1, self.gamma_2 = (nn.Parameter(0.1 * torch.ones(dim)) for _ in range(2))

    def forward(self, x):
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

    def __init__(self, interpolate: bool = False) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
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
        else:
            x = torch.cat((cls, x), dim=1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward(self, x):
        return self.head(self.forward_features(x)[:, 0])


def vision(name: str, build: Any, **more: Any) -> Case:
    """Return a case of an image classifier."""
    return Case(f"own/vision/{name}", build, **({"batch": images(), "loss": classification} | more))


CASES = [
    vision("resnet", ResNet),
    vision("resnet-channels-last", lambda: ResNet().to(memory_format=torch.channels_last)),
    vision("densenet-recomputed", DenseNet),
    vision("vit", ViT),
    vision("vit-interpolated", lambda: ViT(interpolate=True)),
]
