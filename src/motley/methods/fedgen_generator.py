"""FedGen's generator: features for given labels, and its training at the server.

The generator has one hidden layer with batch norm. It is a state of named tensors and not a module,
because it travels: the server keeps it in the method's own state, and clients receive it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.core.part import State
from motley.core.randomness import torch_seed
from motley.methods.labels import one_hot

#: Names of the generator's parameters. Its batch norm also has two running statistics.
PARAMETERS = (
    "hidden.weight",
    "hidden.bias",
    "norm.weight",
    "norm.bias",
    "features.weight",
    "features.bias",
)
STATISTICS = ("norm.running_mean", "norm.running_var")
#: Adam's constants.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Sizes(NamedTuple):
    """The widths of a generator's layers."""

    classes: int
    noise: int
    hidden: int
    features: int


def initial(sizes: Sizes, seed: int) -> State:
    """Return a new generator, with torch's default initialization of linear layers."""
    with torch_seed(seed, "generator"):
        modules = nn.ModuleDict(
            {
                "hidden": nn.Linear(sizes.noise + sizes.classes, sizes.hidden),
                "norm": nn.BatchNorm1d(sizes.hidden),
                "features": nn.Linear(sizes.hidden, sizes.features),
            }
        )
    state = modules.state_dict()
    return {name: state[name].clone() for name in (*PARAMETERS, *STATISTICS)}


def generate(weights: State, labels: Tensor, noise: Tensor, training: bool = False) -> Tensor:
    """Return one feature vector per label.

    In training, batch norm uses the batch and updates its running statistics in place.
    """
    hidden = weights["hidden.weight"]
    inputs = torch.cat([noise, one_hot(labels, hidden.shape[1] - noise.shape[1])], 1)
    x = F.linear(inputs, hidden, weights["hidden.bias"])
    x = F.batch_norm(
        x,
        weights["norm.running_mean"],
        weights["norm.running_var"],
        weights["norm.weight"],
        weights["norm.bias"],
        training=training,
    )
    return F.linear(F.relu(x), weights["features.weight"], weights["features.bias"])


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    """Return exp(-mean over pairs of the noises' distance times the features' distance).

    As in the released code, a distance of noises is a mean of squares, and one of features a mean
    of absolute values. The loss is small if different noise gives different features.
    """
    noise_distances = (noise[:, None] - noise[None]).square().mean(2)
    feature_distances = (features[:, None] - features[None]).abs().mean(2)
    return torch.exp(-(noise_distances * feature_distances).mean())


def draw_labels(counts: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw labels uniformly from the classes with a positive count, without reading a value.

    `torch.multinomial` may wait for a GPU, and this does not.
    """
    ends = (counts > 0).float().cumsum(0)
    positions = torch.rand(number, generator=generator, device=counts.device) * ends[-1]
    return torch.searchsorted(ends, positions, right=True).clamp_max(len(counts) - 1)


#: (labels, features) -> the teachers' loss on a batch of generated features.
TeacherLoss = Callable[[Tensor, Tensor], Tensor]


class Training(NamedTuple):
    """How a generator is trained in a round."""

    steps: int
    batch: int
    lr: float
    lr_decay: float
    weight_decay: float
    diversity: float
    noise: Callable[[int, torch.Generator], Tensor]


def train(
    own: State, counts: Tensor, teacher_loss: TeacherLoss, how: Training, generator: torch.Generator
) -> State:
    """Return a generator, its Adam moments and its mean teacher loss after the steps of a round.

    `own` has the generator's tensors, Adam's under "first/" and "second/", and the number of steps
    so far. `counts` has the number of examples per class.
    """
    weights = {name: own[name].clone() for name in (*PARAMETERS, *STATISTICS)}
    first = {name: own[f"first/{name}"] for name in PARAMETERS}
    second = {name: own[f"second/{name}"] for name in PARAMETERS}
    steps_before = own["steps"]
    lr = how.lr * how.lr_decay ** (steps_before / how.steps).floor()
    teachers = torch.zeros_like(steps_before)
    for number in range(1, how.steps + 1):
        labels = draw_labels(counts, how.batch, generator)
        noise = how.noise(how.batch, generator)
        trained = {name: weights[name].detach().requires_grad_() for name in PARAMETERS}
        with torch.enable_grad():
            features = generate({**weights, **trained}, labels, noise, training=True)
            teacher = teacher_loss(labels, features)
            loss = teacher + how.diversity * diversity_loss(noise, features)
            gradients = torch.autograd.grad(loss, list(trained.values()))
        teachers = teachers + teacher.detach()
        steps = steps_before + number
        for name, gradient in zip(PARAMETERS, gradients, strict=True):
            # Adam, with weight decay in the gradient.
            gradient = gradient + how.weight_decay * weights[name]
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * second[name] + (1 - BETA2) * gradient.square()
            mean = first[name] / (1 - BETA1**steps)
            deviation = (second[name] / (1 - BETA2**steps)).sqrt()
            weights[name] = weights[name] - lr * mean / (deviation + EPSILON)
    return {
        **weights,
        **{f"first/{name}": tensor for name, tensor in first.items()},
        **{f"second/{name}": tensor for name, tensor in second.items()},
        "steps": steps_before + how.steps,
        "teacher_loss": teachers / how.steps,
    }
