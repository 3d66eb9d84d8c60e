"""The real networks of torchvision, timm and transformers, for machines that have the packages.

Run it as a script. Every network is inferred, cut to half its width and run in stages, and the
result is one line per network; with --train, two rounds on random images follow, on the GPU if
there is one, with engine.compile. The exit status is the number of networks that failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from motley.config import resolve
from motley.config.layers import parse_overrides
from motley.core.errors import MotleyError
from motley.data.dataset import Dataset, Examples
from motley.federation import Federation
from motley.models.facts import blocks_of, cross_layers_of, head_of, stages_of
from motley.models.inference import InferenceError, inference_of
from motley.models.inputs import ImageShape
from motley.models.user import spec_of_factory
from motley.splits import SPLITS

SIDE, CLASSES = 64, 10
SHAPE = ImageShape(3, SIDE, SIDE)
TORCHVISION = (
    *("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "mobilenet_v2"),
    *("mobilenet_v3_small", "vgg11_bn", "densenet121", "efficientnet_b0", "convnext_tiny"),
    *("regnet_y_400mf", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "swin_t", "alexnet"),
)
TIMM = (
    *("resnet18", "resnet26d", "mobilenetv2_050", "efficientnet_lite0", "convnext_atto"),
    *("mixer_s32_224", "regnetx_002", "repvgg_a0", "densenet121", "poolformer_s12"),
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"),
)
SIZED = ("vit", "deit", "swin", "mixer")


def torchvision_net(name: str, num_classes: int) -> Any:
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=num_classes)


def torchvision_vit(num_classes: int) -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(SIDE, 16, 2, 4, 64, 128, num_classes=num_classes)


def timm_net(name: str, num_classes: int) -> Any:
    import timm

    options = {"img_size": SIDE} if name.startswith(SIZED) else {}
    return timm.create_model(name, pretrained=False, num_classes=num_classes, **options)


def networks() -> dict[str, Callable[..., Any]]:
    """Return the factories of the packages that can be imported."""
    factories: dict[str, Callable[..., Any]] = {}
    if importlib.util.find_spec("torchvision"):
        for name in TORCHVISION:
            factories[f"torchvision {name}"] = partial(torchvision_net, name)
        factories["torchvision vit"] = torchvision_vit
    if importlib.util.find_spec("timm"):
        for name in TIMM:
            factories[f"timm {name}"] = partial(timm_net, name)
    return factories


def describe(factory: Callable[..., Any]) -> str:
    """Return what is inferred about a network, and the share of parameters at half width."""
    spec = spec_of_factory(factory)
    model = spec.make(None, SHAPE, CLASSES)
    total = sum(p.numel() for p in model.parameters())
    parts = [f"{total / 1e6:.1f}M"]
    facts: dict[str, Callable[[], object]] = {
        "head": lambda: head_of(model),
        "blocks": lambda: len(blocks_of(model)),
        "stages": lambda: len(stages_of(model)),
        "pairs": lambda: len(cross_layers_of(model)),
        "streams": lambda: len(inference_of(model).streams.widths),
        "fixed": lambda: len(inference_of(model).streams.fixed),
        "half": lambda: _half(partial(spec.make, None, SHAPE, CLASSES), total),
    }
    for name, fact in facts.items():
        try:
            parts.append(f"{name}={fact()}")
        except (MotleyError, InferenceError) as error:
            parts.append(f"{name} REFUSED: {error};")
    return " ".join(parts)


def _half(build: Callable[[], Any], total: int) -> str:
    width = SPLITS["width"]
    split = width({"net": build}, width.Settings(rates=(1.0, 0.5)))
    narrow = split.blueprints["net-w0.5"].module
    return f"{sum(p.numel() for p in narrow.parameters()) / total:.0%}"


def train(name: str) -> str:
    """Train two rounds of a network in two widths on random images."""
    numbers = np.random.default_rng(0)

    def examples(count: int) -> Examples:
        images = numbers.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
        return Examples(images, numbers.integers(0, CLASSES, count))

    overrides = [
        f"model.sizes=['tests.models.foreign_gpu:{name}']",
        "split.name=width",
        "split.rates=[1,0.5]",
        "data.transform.resize=0",
        "federation.clients=4",
        "federation.clients_per_round=4",
        "training.rounds=2",
        "training.batch_size=16",
        f"engine.compile={str(torch.cuda.is_available()).lower()}",
    ]
    config = resolve("quickstart", [parse_overrides(overrides)])
    federation = Federation(config, dataset=Dataset("noise", examples(256), examples(64), CLASSES))
    server = federation.initial_state()
    for _ in range(2):
        server, record = federation.run_round(server)
        assert not record.refused, record.refused
    return f"two rounds, loss {record.train_loss:.3f}"


def real_resnet18(num_classes: int) -> Any:
    """Return torchvision's ResNet-18, for `--train`."""
    return torchvision_net("resnet18", num_classes)


def real_vit(num_classes: int) -> Any:
    """Return timm's smallest ViT, for `--train`."""
    return timm_net("vit_tiny_patch16_224", num_classes)


def main() -> int:
    """Describe all networks, and train two of them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true")
    chosen = parser.parse_args()
    failures = 0
    jobs: dict[str, Callable[[], str]] = {}
    for name, factory in networks().items():
        jobs[name] = partial(describe, factory)
    if chosen.train:
        jobs["train torchvision resnet18"] = partial(train, "real_resnet18")
        jobs["train timm vit"] = partial(train, "real_vit")
    for name, job in jobs.items():
        start = time.perf_counter()
        try:
            result = job()
        except Exception as error:
            failures += 1
            result = f"FAILED {type(error).__name__}: {str(error)[:300]}"
        print(f"{name}: {result} ({time.perf_counter() - start:.1f} s)", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
