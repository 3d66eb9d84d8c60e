"""Networks that are not Motley's, written as their projects publish them, in tiny sizes.

None of them knows of Motley. torchvision and timm cannot be imported everywhere, so their networks
are written here from their published structure; `foreign_gpu.py` runs the real ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- torchvision's ResNet


class TorchvisionBasicBlock(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class TorchvisionResNet(nn.Module):
    def __init__(self, layers: tuple[int, ...], channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.inplanes = 8
        for number, (planes, count) in enumerate(zip((8, 16), layers, strict=True), 1):
            blocks = []
            for at in range(count):
                stride = 2 if number > 1 and at == 0 else 1
                blocks.append(TorchvisionBasicBlock(self.inplanes, planes, stride))
                self.inplanes = planes
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, num_classes)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


def resnet(input_shape: tuple[int, ...], num_classes: int, layers: tuple[int, ...] = (2, 2)) -> Any:
    return TorchvisionResNet(layers, input_shape[0], num_classes)


def resnet_small(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return resnet(input_shape, num_classes, (1, 1))


# ---- torchvision's MobileNetV2


class Conv2dNormActivation(nn.Sequential):
    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, inp: int, oup: int, stride: int, expand_ratio: int) -> None:
        super().__init__()
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        layers: list[nn.Module] = []
        if expand_ratio != 1:
            layers.append(Conv2dNormActivation(inp, hidden_dim, kernel=1))
        layers += [
            Conv2dNormActivation(hidden_dim, hidden_dim, stride=stride, groups=hidden_dim),
            nn.Conv2d(hidden_dim, oup, 1, 1, 0, bias=False),
            nn.BatchNorm2d(oup),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, channels: int, num_classes: int, repeats: int) -> None:
        super().__init__()
        features: list[nn.Module] = [Conv2dNormActivation(channels, 8, stride=2)]
        inputs = 8
        for expand, width, count, stride in ((1, 8, 1, 1), (4, 12, repeats, 2)):
            for number in range(count):
                features.append(
                    InvertedResidual(inputs, width, stride if number == 0 else 1, expand)
                )
                inputs = width
        features.append(Conv2dNormActivation(inputs, 32, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


def mobilenet(input_shape: tuple[int, ...], num_classes: int, repeats: int = 3) -> Any:
    return MobileNetV2(input_shape[0], num_classes, repeats)


def mobilenet_small(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return mobilenet(input_shape, num_classes, 2)


# ---- torchvision's RegNet: grouped convolutions of one group width, and squeeze-and-excitation


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation, self.scale_activation = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(scale)) * x


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class BottleneckTransform(nn.Sequential):
    def __init__(
        self, width_in: int, width_out: int, stride: int, group_width: int, se_ratio: float
    ) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        groups = width_out // group_width
        layers["a"] = conv_norm(width_in, width_out, 1).append(nn.ReLU(inplace=True))
        layers["b"] = conv_norm(width_out, width_out, 3, stride, groups).append(
            nn.ReLU(inplace=True)
        )
        if se_ratio:
            layers["se"] = SqueezeExcitation(width_out, round(se_ratio * width_in))
        layers["c"] = conv_norm(width_out, width_out, 1)
        super().__init__(layers)


class RegNetBlock(nn.Module):
    def __init__(
        self, width_in: int, width_out: int, stride: int, group_width: int, se_ratio: float
    ) -> None:
        super().__init__()
        self.proj = None
        if width_in != width_out or stride != 1:
            self.proj = conv_norm(width_in, width_out, 1, stride)
        self.f = BottleneckTransform(width_in, width_out, stride, group_width, se_ratio)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x) + (x if self.proj is None else self.proj(x))
        return self.activation(x)


def regnet_widths(
    depth: int, w_0: int, w_a: float, w_m: float, group_width: int
) -> list[tuple[int, int]]:
    """Return the width and depth of every stage: equations 2 to 4 of Radosavovic et al., CVPR 2020.

    torchvision computes them with tensors, for which torch's meta device has no values.
    """
    linear = w_0 + torch.arange(depth) * w_a
    exponents = torch.round(torch.log(linear / w_0) / math.log(w_m))
    quantized = torch.round(w_0 * torch.pow(w_m, exponents) / 8) * 8
    widths = [
        max(group_width, width // group_width * group_width) for width in quantized.int().tolist()
    ]
    return [(width, widths.count(width)) for width in sorted(set(widths))]


class RegNet(nn.Module):
    def __init__(
        self, channels: int, num_classes: int, depth: int, group_width: int, se_ratio: float
    ) -> None:
        super().__init__()
        self.stem = conv_norm(channels, 8, 3, 2).append(nn.ReLU(inplace=True))
        width_in = 8
        stages = []
        for number, (width, count) in enumerate(
            regnet_widths(depth, 24, 20.0, 2.2, group_width), 1
        ):
            blocks = OrderedDict()
            for at in range(count):
                stride = 2 if at == 0 else 1
                blocks[f"block{number}-{at}"] = RegNetBlock(
                    width_in, width, stride, group_width, se_ratio
                )
                width_in = width
            stages.append((f"block{number}", nn.Sequential(blocks)))
        self.trunk_output = nn.Sequential(OrderedDict(stages))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk_output(self.stem(x))
        return self.fc(self.avgpool(x).flatten(start_dim=1))


def regnet(input_shape: tuple[int, ...], num_classes: int, depth: int = 4) -> Any:
    return RegNet(input_shape[0], num_classes, depth, 8, 0.25)


def regnet_small(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return regnet(input_shape, num_classes, 3)


# ---- timm's ResNeXt: bottlenecks whose second convolution has groups of a few channels


class TimmBottleneck(nn.Module):
    expansion = 4

    def __init__(
        self, inplanes: int, planes: int, stride: int, cardinality: int, base_width: int
    ) -> None:
        super().__init__()
        width = int(planes * (base_width / 16)) * cardinality
        outplanes = planes * self.expansion
        self.conv1 = nn.Conv2d(inplanes, width, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=cardinality, bias=False)
        self.bn2, self.drop_block, self.act2 = (
            nn.BatchNorm2d(width),
            nn.Identity(),
            nn.ReLU(inplace=True),
        )
        self.aa = nn.Identity()
        self.conv3 = nn.Conv2d(width, outplanes, 1, bias=False)
        self.bn3, self.se, self.act3 = nn.BatchNorm2d(outplanes), None, nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != outplanes:
            self.downsample = conv_norm(inplanes, outplanes, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.aa(self.act2(self.drop_block(self.bn2(self.conv2(x)))))
        x = self.bn3(self.conv3(x))
        if self.se is not None:
            x = self.se(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act3(x)


class ResNeXt(nn.Module):
    def __init__(self, channels: int, num_classes: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, 1, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        inplanes = 8
        for number, (planes, count) in enumerate(zip((4, 8), layers, strict=True), 1):
            blocks = []
            for at in range(count):
                stride = 2 if number > 1 and at == 0 else 1
                blocks.append(TimmBottleneck(inplanes, planes, stride, 4, 8))
                inplanes = planes * 4
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inplanes, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        return self.layer2(self.layer1(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.forward_features(x).mean((2, 3)))


def resnext(
    input_shape: tuple[int, ...], num_classes: int, layers: tuple[int, ...] = (2, 2)
) -> Any:
    return ResNeXt(input_shape[0], num_classes, layers)


def resnext_small(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return resnext(input_shape, num_classes, (1, 1))


# ---- convolutions on one stream whose groups do not fit each other


class UnlikeGroups(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 12, 3, padding=1)
        self.three = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.four = nn.Conv2d(12, 12, 3, padding=1, groups=4)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + F.relu(self.three(x))
        x = x + F.relu(self.four(x))
        return self.fc(x.mean((2, 3)))


def unlike_groups(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return UnlikeGroups(input_shape[0], num_classes)


# ---- timm's vision transformer


class PatchEmbed(nn.Module):
    def __init__(self, side: int, patch: int, channels: int, dim: int) -> None:
        super().__init__()
        self.img_size, self.patch_size = (side, side), (patch, patch)
        self.num_patches = (side // patch) ** 2
        self.proj = nn.Conv2d(channels, dim, patch, patch)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        _, _, height, width = x.shape
        assert (height, width) == self.img_size
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * self.scale
        attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        x = self.attn_drop(attn) @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.ls1 = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, side: int, channels: int, num_classes: int, depth: int) -> None:
        super().__init__()
        dim = 16
        self.embed_dim = dim
        self.patch_embed = PatchEmbed(side, side // 2, channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(dim, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.head_drop(x[:, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def vit(input_shape: tuple[int, ...], num_classes: int, depth: int = 2) -> Any:
    return VisionTransformer(input_shape[-1], input_shape[0], num_classes, depth)


def vit_small(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return vit(input_shape, num_classes, 1)


# ---- Hugging Face


def bert(num_classes: int, layers: int = 2) -> Any:
    transformers = __import__("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=num_classes,
    )
    return transformers.BertForSequenceClassification(config)


def bert_small(num_classes: int) -> Any:
    return bert(num_classes, 1)


# ---- an LSTM


class LSTMClassifier(nn.Module):
    def __init__(self, vocabulary: int, num_classes: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 12)
        self.lstm = nn.LSTM(12, 10, layers, batch_first=True, dropout=0.1 if layers > 1 else 0.0)
        self.fc = nn.Linear(10, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embed(tokens))
        return self.fc(outputs[:, -1])


def lstm(num_classes: int, layers: int = 2) -> Any:
    return LSTMClassifier(20, num_classes, layers)


def lstm_small(num_classes: int) -> Any:
    return lstm(num_classes, 1)


# ---- a U-Net that classifies, and a network with two heads


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(channels, 8), DoubleConv(8, 16)
        self.bottom = DoubleConv(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.conv2 = DoubleConv(32, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.conv1 = DoubleConv(16, 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.conv2(torch.cat([second, self.up2(x)], dim=1))
        x = self.conv1(torch.cat([first, self.up1(x)], dim=1))
        return self.head(x.mean(dim=(2, 3)))


def unet(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return UNet(input_shape[0], num_classes)


class TwoHeads(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(channels, 8, 3, padding=1)
        self.classes, self.boxes = nn.Linear(8, num_classes), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.body(x)).mean((2, 3))
        return self.classes(x), self.boxes(x)


def two_heads(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return TwoHeads(input_shape[0], num_classes)


# ---- PyTorch's tutorial


class TutorialNet(nn.Module):
    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.side = (side - 2) // 2
        self.fc1 = nn.Linear(16 * self.side**2, 20)
        self.fc2 = nn.Linear(20, 14)
        self.fc3 = nn.Linear(14, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.relu(self.conv2(x))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return self.fc3(x)


def tutorial(input_shape: tuple[int, ...], num_classes: int) -> Any:
    return TutorialNet(input_shape[0], input_shape[-1], num_classes)


def tutorial_small(input_shape: tuple[int, ...], num_classes: int) -> Any:
    net = tutorial(input_shape, num_classes)
    net.fc2, net.fc3 = nn.Identity(), nn.Linear(20, num_classes)
    return net
