"""What the first batch of a new length costs on a GPU. Run it from the repository:

    python benchmarks/new_length.py [--json FILE]

One step (forward and backward) of FedImpro's ResNet-18 in fp16 with our kernels, for batches of several lengths, each
twice: where the first is slower, kernels were compiled. Begin with an empty ~/.triton, which keeps what was compiled.
"""

from __future__ import annotations

import sys
import time

import torch
from report import arguments, machine, report
from torch.nn import functional as F

from motley.client.fused import apply_kernels
from motley.client.weights import Weights
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings

LENGTHS = (128, 127, 101, 64, 37, 5)


def main() -> None:
    """Take two steps of every length and print their seconds."""
    options = arguments(__doc__).parse_args()
    model = MODELS["resnet18"].make(ResNetSettings(stem="cifar"), ImageShape(3, 32, 32), 10)
    model = model.cuda().to(memory_format=torch.channels_last)
    model = apply_kernels(model)
    weights = Weights(model, "fp16")

    def seconds(length: int) -> float:
        images = torch.randn(length, 3, 32, 32, device="cuda", dtype=torch.float16)
        labels = torch.zeros(length, dtype=torch.long, device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        answers = model(images.to(memory_format=torch.channels_last))
        weights.backward(F.cross_entropy(answers.float(), labels))
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    rows = [
        {"examples": length, "first, s": seconds(length), "again, s": seconds(length)}
        for length in LENGTHS
    ]
    report(rows, {"gpu": torch.cuda.get_device_name(), **machine("torch", "triton")}, options.json)


if __name__ == "__main__":
    sys.exit(main())
