"""Convolutional networks for images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Case
from tests.zoo.inputs import classification, generator, images


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

    def __init__(self, zero_init_residual: bool = False) -> None:
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
            if zero_init_residual and isinstance(m, BasicBlock):
                nn.init.constant_(m.bn2.weight, 0)

    def _make_layer(self, inplanes: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
        layers = [BasicBlock(inplanes, planes, stride)]
        layers += [BasicBlock(planes, planes) for _ in range(blocks - 1)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class LayerNorm2d(nn.Module):
    """ConvNeXt's normalization over channels, with both data formats."""

    def __init__(self, dim: int, data_format: str = "channels_first") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-6)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


def drop_path(x: torch.Tensor, drop_prob: float, training: bool) -> torch.Tensor:
    """Drop whole samples of a residual branch, as timm does."""
    if drop_prob == 0.0 or not training:
        return x
    keep = 1 - drop_prob
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * mask.div_(keep)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = LayerNorm2d(dim, "channels_last")
        self.pwconv1 = nn.Linear(dim, 2 * dim)
        self.pwconv2 = nn.Linear(2 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim), requires_grad=True)
        self.rate = rate

    def forward(self, x):
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(y))))
        return x + drop_path(y.permute(0, 3, 1, 2), self.rate, self.training)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 8, 2, 2), LayerNorm2d(8)),
                nn.Sequential(LayerNorm2d(8), nn.Conv2d(8, 12, 2, 2)),
            ]
        )
        self.stages = nn.ModuleList(
            [nn.Sequential(ConvNeXtBlock(d, 0.3), ConvNeXtBlock(d, 0.5)) for d in (8, 12)]
        )
        self.norm = nn.LayerNorm(12, eps=1e-6)
        self.head = nn.Linear(12, 5)

    def forward_features(self, x):
        for i in range(2):
            x = self.stages[i](self.downsample_layers[i](x))
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        return self.head(self.forward_features(x))


class DenseLayer(nn.Module):
    def __init__(self, channels: int, efficient: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, 4, 3, padding=1, bias=False)
        self.efficient = efficient

    def bottleneck(self, *inputs):
        return self.conv(F.relu(self.norm(torch.cat(inputs, 1))))

    def forward(self, features):
        if self.efficient and any(f.requires_grad for f in features):
            return checkpoint(self.bottleneck, *features, use_reentrant=False)
        return self.bottleneck(*features)


class DenseNet(nn.Module):
    """Each layer reads the list of all earlier outputs. The efficient form recomputes them."""

    def __init__(self, efficient: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.block = nn.ModuleDict({f"denselayer{i}": DenseLayer(6 + 4 * i, efficient) for i in range(3)})
        self.classifier = nn.Linear(18, 5)

    def forward(self, x):
        features = [self.stem(x)]
        for _name, layer in self.block.items():
            features.append(layer(features))
        return self.classifier(torch.cat(features, 1).mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(scale), inplace=True)))


class MBConv(nn.Module):
    def __init__(self, channels: int, rate: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1, bias=False),
            nn.BatchNorm2d(2 * channels, momentum=0.01),
            nn.SiLU(inplace=True),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels, bias=False),
            nn.BatchNorm2d(2 * channels, momentum=0.01),
            nn.SiLU(inplace=True),
            SqueezeExcite(2 * channels),
            nn.Conv2d(2 * channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels, momentum=0.01),
        )
        self.rate = rate

    def forward(self, x):
        return x + drop_path(self.block(x), self.rate, self.training)


class SkippedBlocks(nn.Module):
    """Stochastic depth that skips whole blocks, so that some parameters get no gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.blocks = nn.ModuleList([MBConv(6, 0.0) for _ in range(4)])
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and torch.rand(1).item() < 0.5:
                continue
            x = block(x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Encoder and decoder with concatenated skips; ``up`` and ``down`` are plain attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = self.double_conv(3, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), self.double_conv(4, 8))
        self.up1 = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.conv = self.double_conv(8, 4)
        self.outc = nn.Conv2d(4, 5, 1)

    @staticmethod
    def double_conv(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        return self.outc(self.conv(torch.cat([x1, self.up1(x2)], dim=1)))


class WSConv2d(nn.Conv2d):
    """Weight standardization, with a gain that is a parameter of one element for each channel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        w = self.weight
        mean = w.mean(dim=(1, 2, 3), keepdim=True)
        std = w.view(w.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        w = self.gain * (w - mean) / std.expand_as(w)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class DeformableConv(nn.Module):
    """A convolution whose sampling grid another convolution predicts; ``unfold`` and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Conv2d(6, 2, 3, padding=1)
        nn.init.constant_(self.offset.weight, 0.01)
        self.weight = nn.Parameter(torch.randn(6, 6, 3, 3) * 0.1)
        self.register_buffer("grid", F.affine_grid(torch.eye(2, 3)[None], (1, 1, 8, 8), align_corners=False))

    def forward(self, x):
        grid = self.grid + torch.tanh(self.offset(x)).permute(0, 2, 3, 1) * 0.2
        x = F.grid_sample(x, grid, align_corners=False)
        columns = F.unfold(x, 3, padding=1)
        return (self.weight.view(6, -1) @ columns).view(x.shape)


class Inception(nn.Module):
    """Branches, and an auxiliary head that exists in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.branch1 = nn.Conv2d(3, 4, 1)
        self.branch2 = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.aux = nn.Linear(8, 5)
        self.tail = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.cat([branch(x) for branch in (self.branch1, self.branch2)], 1)
        aux = self.aux(x.mean((2, 3))) if self.training else None
        out = self.fc(self.tail(x).mean((2, 3)))
        return (out, aux) if self.training else out


def inception_loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Add the auxiliary loss in training."""
    out = model(inputs[0])
    if isinstance(out, tuple):
        return F.cross_entropy(out[0], inputs[1]) + 0.3 * F.cross_entropy(out[1], inputs[1])
    return F.cross_entropy(out, inputs[1])


class RepVGGBlock(nn.Module):
    """Evaluation fuses the branches' weights into one kernel, read through attributes of submodules."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv3, self.conv1 = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        if self.training:
            return F.relu(self.conv3(x) + self.conv1(x) + x)
        identity = torch.eye(x.shape[1])[:, :, None, None]
        kernel = self.conv3.weight + F.pad(self.conv1.weight + identity, [1, 1, 1, 1])
        return F.relu(F.conv2d(x, kernel, self.conv3.bias + self.conv1.bias, padding=1))


class FeaturePyramid(nn.Module):
    """A backbone that returns a dict of features, lateral layers in a ModuleDict, heads shared by levels."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"c2": nn.Conv2d(3, 6, 3, 2, 1), "c3": nn.Conv2d(6, 8, 3, 2, 1)})
        self.lateral = nn.ModuleDict({"c2": nn.Conv2d(6, 6, 1), "c3": nn.Conv2d(8, 6, 1)})
        self.head = nn.Conv2d(6, 5, 3, padding=1)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in range(2)])

    def forward(self, x):
        maps = {}
        for name, layer in self.backbone.items():
            x = maps[name] = F.relu(layer(x))
        p3 = self.lateral["c3"](maps["c3"])
        p2 = self.lateral["c2"](maps["c2"]) + F.interpolate(p3, scale_factor=2)
        out = [scale * self.head(p) for scale, p in zip(self.scales, (p2, p3), strict=True)]
        return sum(level.mean((2, 3)) for level in out)


def vision(name: str, build: Any, **more: Any) -> Case:
    """Return a case of an image classifier."""
    return Case(f"own/vision/{name}", build, **({"batch": images(), "loss": classification} | more))


def dense_labels(step: int) -> Any:
    """Return images and a label for each pixel."""
    return images()(step)[0], torch.randint(5, (4, 8, 8), generator=generator(100 + step))


def stem(*layers: nn.Module) -> nn.Sequential:
    """Put layers on six channels between a convolution and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )


CASES = [
    vision("resnet", ResNet),
    vision("resnet-zero-init", lambda: ResNet(zero_init_residual=True)),
    vision("resnet-channels-last", lambda: ResNet().to(memory_format=torch.channels_last)),
    vision("convnext", ConvNeXt),
    vision("densenet", lambda: DenseNet(efficient=False)),
    vision("densenet-efficient", lambda: DenseNet(efficient=True)),
    vision("efficientnet", lambda: stem(MBConv(6, 0.2), MBConv(6, 0.4))),
    vision("skipped-blocks", SkippedBlocks),
    vision("unet", UNet, batch=dense_labels),
    vision(
        "weight-standardization",
        lambda: stem(WSConv2d(6, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), WSConv2d(6, 6, 3)),
    ),
    vision("deformable", lambda: stem(DeformableConv(), nn.ReLU(), DeformableConv())),
    vision("inception-auxiliary", Inception, loss=inception_loss),
    vision("repvgg", lambda: stem(RepVGGBlock(6), RepVGGBlock(6))),
    vision("feature-pyramid", FeaturePyramid),
]
