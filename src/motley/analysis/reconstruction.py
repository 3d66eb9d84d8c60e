"""Reconstruction attacks: how much features reveal about images.

FedIN, Sections 4.3 and 5.5; FedImpro, Appendix F.7. An attacker who sees features s and knows the
extractor f searches for an image with the same features, by gradient descent on its pixels:

    min_x  mean (f(x) - s)^2 / var(s) + smoothness * total variation(x)

FedIN's objective is the first term alone, from an image of noise. Features with noise, or the mean
over several images, reveal less. Noise is added to the features that the attacker sees, in standard
deviations of the features (FedIN's z) or absolute (FedImpro's epsilon, on its shared means).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from motley.analysis.features import cut, extractor
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.margin import CUT, cut_stage
from motley.analysis.perceptual import lpips_distance
from motley.analysis.replay import examples_at, global_model, log, open_run
from motley.core.errors import MotleyError, unknown
from motley.core.randomness import torch_seed
from motley.federation import Federation
from motley.server.state import ServerState
from motley.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

#: The weight of total variation in the attacker's loss, a prior that separates images from noise.
SMOOTHNESS = 1e-3
#: The number of gradient steps of an attack.
STEPS = 400
#: At most this many examples are averaged into the mean features of a class or a client, in
#: batches of this many.
MEAN_EXAMPLES, BATCH = 500, 100
#: The id that stands for no client: test images are attacked.
NO_CLIENT = -1
#: The image of rows that are means over all images.
ALL = "all"
MEASURES = ("ssim", "psnr", "lpips")
COLUMNS = ("run", "known to the attacker", "noise", "start", "step", "image", *MEASURES)

Known = Literal["features", "mean", "class mean", "client mean"]
Start = Literal["gray", "noise"]


class PrivacySettings(Settings):
    """Settings of the analysis `privacy`."""

    known: tuple[Known, ...] = ("features", "mean")
    """The features that the attacker sees, one attack for each. features: of a single image. mean:
    the mean over all attacked images. class mean: the mean over (up to 500) examples of an image's
    class. client mean: the mean over (up to 500) examples of `client`. FedImpro's clients share
    class means.
    """
    noise: tuple[Annotated[float, Field(ge=0)], ...] = (0.0, 0.8)
    """Levels of the Gaussian noise on these features; 0.8 is FedIN's."""
    noise_unit: Literal["sigma", "absolute"] = "sigma"
    """sigma: levels are in standard deviations of the features. absolute: they are the noise's
    standard deviation, as in FedImpro.
    """
    start: tuple[Start, ...] = ("gray",)
    """The image that the attack starts from. gray: one value. noise: uniform noise, as in FedIN."""
    smoothness: float = Field(SMOOTHNESS, ge=0)
    """Weight of the total variation in the attacker's loss. 0: FedIN's loss."""
    steps: int = Field(STEPS, ge=1)
    """Number of the attack's gradient steps."""
    every: int = Field(0, ge=0)
    """Measure the images every so many steps, too. 0: only at the end."""
    stage: str = ""
    """The stage behind which features are taken. Default: the first. cut: FedImpro's cut."""
    size: str = ""
    """The size whose extractor is attacked. Default: the first."""
    client: int = Field(NO_CLIENT, ge=NO_CLIENT)
    """The client whose training images are attacked. -1: test images are."""
    classes: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The classes of the attacked images. Default: the class of the first image."""
    images: int = Field(6, ge=1)
    """Number of images to attack."""

    @model_validator(mode="after")
    def _client_means_need_a_client(self) -> PrivacySettings:
        if "client mean" in self.known and self.client == NO_CLIENT:
            raise ValueError("privacy.known = 'client mean': needs privacy.client")
        return self


def psnr(image: Tensor, other: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB. The peak is the range of the first image."""
    error = (image - other).square().mean()
    return float(20 * torch.log10((image.max() - image.min()) / error.sqrt().clamp(min=1e-12)))


def ssim(image: Tensor, other: Tensor) -> float:
    """Return the structural similarity of two images (channels, height, width).

    Windows are Gaussian with a standard deviation of 1.5 pixels. Wang et al., "Image Quality
    Assessment: From Error Visibility to Structural Similarity", 2004.
    """
    span = float(image.max() - image.min())
    side = min(11, *image.shape[1:])
    distance = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weights = torch.exp(-distance.square() / (2 * 1.5**2))
    window = torch.outer(weights, weights).div(weights.sum() ** 2)[None, None]
    a = image.double().cpu()[:, None]
    b = other.double().cpu()[:, None]
    mean_a, mean_b = F.conv2d(a, window), F.conv2d(b, window)
    variance_a = F.conv2d(a * a, window) - mean_a**2
    variance_b = F.conv2d(b * b, window) - mean_b**2
    covariance = F.conv2d(a * b, window) - mean_a * mean_b
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    numerator = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    denominator = (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
    return float((numerator / denominator).mean())


@dataclass(frozen=True)
class Snapshot:
    """The images of an attack after a number of steps."""

    step: int
    images: Tensor


def reconstruct(
    extract: Callable[[Tensor], Tensor],
    target: Tensor,
    like: Tensor,
    steps: int = STEPS,
    *,
    start: Start = "gray",
    smoothness: float = SMOOTHNESS,
    every: int = 0,
) -> Iterator[Snapshot]:
    """Yield images whose features are close to `target`, with the shape and range of `like`.

    The last ones are those after all steps; `every` asks for earlier ones as well.
    """
    low, high = float(like.min()), float(like.max())
    images = starting_images(like, start).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=(high - low) / 20)
    target_variance = target.var().clamp(min=1e-12)
    for step in range(steps):
        if every and step and step % every == 0:
            yield Snapshot(step, images.detach().clone())
        # Cosine decay to zero.
        optimizer.param_groups[0]["lr"] = (
            (high - low) / 20 * (1 + math.cos(math.pi * step / steps)) / 2
        )
        variation = images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
        error = F.mse_loss(extract(images), target) / target_variance
        (images.grad,) = torch.autograd.grad(error + smoothness * variation, [images])
        optimizer.step()
        with torch.no_grad():
            images.clamp_(low, high)
    yield Snapshot(steps, images.detach())


def starting_images(like: Tensor, start: Start) -> Tensor:
    """Return images of the middle of the range of `like`, or of uniform noise over that range."""
    low, high = float(like.min()), float(like.max())
    if start == "gray":
        return torch.full_like(like, (low + high) / 2)
    with torch_seed(0, "start"):
        noise = torch.rand(like.shape)
    return (low + (high - low) * noise).to(like)


def add_noise(features: Tensor, noise: float, seed: int, unit: str = "sigma") -> Tensor:
    """Return features with Gaussian noise of `noise` times their standard deviation.

    With the unit "absolute", `noise` is the noise's standard deviation itself.
    """
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(features.shape, generator=generator).to(features.device)
    scale = features.std() if unit == "sigma" else 1.0
    return features + noise * scale * gaussian


@dataclass(frozen=True)
class Attacked:
    """The attacked images, and the examples that the means of a class or a client are over."""

    images: Tensor
    labels: Tensor
    class_examples: Mapping[int, Tensor] = field(default_factory=dict)
    client_examples: Tensor | None = None


@torch.no_grad()
def target_features(
    extract: Callable[[Tensor], Tensor],
    attacked: Attacked,
    known: Known,
    add: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the features that the attacker has for each image, after `add` added the noise.

    A mean is one tensor with one noise, which the attacker uses for all images it is the mean of.
    """
    if known == "features":
        return add(extract(attacked.images))
    if known == "class mean":
        classes, positions = attacked.labels.unique(return_inverse=True)
        means = []
        for label in classes.tolist():
            means.append(mean_features(extract, attacked.class_examples[label]))
        return add(torch.stack(means))[positions]
    examples = attacked.images if known == "mean" else attacked.client_examples
    assert examples is not None
    mean = add(mean_features(extract, examples))
    return mean.expand(len(attacked.images), *mean.shape)


def mean_features(extract: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return the mean of the images' features, computed in batches."""
    sums = [extract(batch).sum(0) for batch in images.split(BATCH)]
    return torch.stack(sums).sum(0) / len(images)


@dataclass(frozen=True)
class Attack:
    """One attack: the known features, the level of the noise, and the start."""

    known: Known
    noise: float
    start: Start


def attacks(settings: PrivacySettings) -> list[Attack]:
    """Return all combinations of the settings."""
    combinations = []
    for known in settings.known:
        for noise in settings.noise:
            for start in settings.start:
                combinations.append(Attack(known, noise, start))
    return combinations


def run_attack(
    extract: Callable[[Tensor], Tensor],
    attacked: Attacked,
    attack: Attack,
    settings: PrivacySettings,
) -> Iterator[Snapshot]:
    """Yield the images that an attack reconstructs."""

    def add(features: Tensor) -> Tensor:
        return add_noise(features, attack.noise, seed=1, unit=settings.noise_unit)

    target = target_features(extract, attacked, attack.known, add)
    yield from reconstruct(
        extract,
        target,
        attacked.images,
        settings.steps,
        start=attack.start,
        smoothness=settings.smoothness,
        every=settings.every,
    )


@analysis(
    "privacy",
    "images reconstructed from features: over noise levels, from means, from a noise start",
    PrivacySettings,
    classes=True,
)
def privacy(paths: Sequence[Path], settings: PrivacySettings) -> Findings:
    """Attack the extractor of one size at the newest checkpoint."""
    lpips, notes = _lpips()
    rows: list[tuple[Any, ...]] = []
    pictures: dict[str, Tensor] = {}
    for path in paths:
        with open_run(path) as (federation, servers):
            extract = attacked_extractor(federation, servers[-1], settings)
            attacked = attacked_images(federation, settings)
            pictures[f"{path.name}: true"] = attacked.images
            for attack in attacks(settings):
                title = f"{path.name}: {attack.known}, noise {attack.noise:g}, {attack.start} start"
                log.info("attack, %s", title)
                for snapshot in run_attack(extract, attacked, attack, settings):
                    pictures[title] = snapshot.images
                    qualities = []
                    for image, other in zip(attacked.images, snapshot.images, strict=True):
                        quality = (ssim(image, other), psnr(image, other), lpips(image, other))
                        qualities.append(quality)
                    about = (path.name, attack.known, attack.noise, attack.start, snapshot.step)
                    for number, quality in enumerate(qualities):
                        rows.append((*about, number, *quality))
                    rows.append((*about, ALL, *_means(qualities)))
    return Findings(COLUMNS, rows, _draw(pictures, rows, settings), notes)


def attacked_extractor(
    federation: Federation, server: ServerState, settings: PrivacySettings
) -> Callable[[Tensor], Tensor]:
    """Return the function that computes the features, with the weights of the server."""
    size = settings.size or federation.split.sizes[0]
    if size not in federation.split.sizes:
        raise MotleyError(f"privacy.size: {unknown('size', size, federation.split.sizes)}")
    model = global_model(federation, server, size).requires_grad_(False)
    if not settings.stage:
        return extractor(model)
    stage = settings.stage
    if stage == CUT:
        stage = cut_stage(federation, size, "privacy.stage")
    return cut(model, stage, "privacy.stage", size).low


def attacked_images(federation: Federation, settings: PrivacySettings) -> Attacked:
    """Return the first images of the chosen classes, and the examples they come from."""
    data = federation.dataset
    clients = federation.config.federation.clients
    if settings.client >= clients:
        raise MotleyError(
            f"privacy.client = {settings.client}: Allowed: {NO_CLIENT} to {clients - 1}."
        )
    if settings.client == NO_CLIENT:
        examples, rows = data.test, np.arange(len(data.test))
    else:
        examples, rows = data.train, federation.partition.of(settings.client)
    labels = examples.targets[rows]
    classes = settings.classes or (int(labels[0]),)
    chosen = rows[np.isin(labels, classes)]
    if not len(chosen):
        present = ", ".join(map(str, np.unique(labels)))
        raise MotleyError(
            f"privacy.classes = {list(classes)}: there are no such images. Allowed: {present}."
        )
    images, image_labels = examples_at(federation, examples, chosen[: settings.images])
    class_examples = {}
    if "class mean" in settings.known:
        for label in image_labels.unique().tolist():
            of_class = rows[labels == label][:MEAN_EXAMPLES]
            class_examples[label], _ = examples_at(federation, examples, of_class)
    client_examples = None
    if "client mean" in settings.known:
        client_examples, _ = examples_at(federation, examples, rows[:MEAN_EXAMPLES])
    return Attacked(images, image_labels, class_examples, client_examples)


def _means(qualities: Sequence[tuple[float | None, ...]]) -> list[float | None]:
    """Return the mean of each measure over images, or None for one that was not computed."""
    means: list[float | None] = []
    for values in zip(*qualities, strict=True):
        known = [value for value in values if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _lpips() -> tuple[Callable[[Tensor, Tensor], float | None], tuple[str, ...]]:
    """Return the LPIPS distance and no notes, or a function that returns None and the reason."""
    try:
        return lpips_distance(), ()
    except MotleyError as error:
        note = f"{error} The column lpips is empty; ssim and psnr are not affected."
        return lambda image, other: None, (note,)


def _draw(
    pictures: dict[str, Tensor], rows: list[tuple[Any, ...]], settings: PrivacySettings
) -> Figure:
    """Draw the images, one row per attack, and below them their quality.

    The quality is drawn over the levels of noise, or over steps if there are several.
    """
    figure = new_figure(max(1.3 * settings.images, 12), 1.5 * len(pictures) + 3.5)
    heights = [1.5 * len(pictures), 3.5]
    halves = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
    above, below = halves[0, 0], halves[1, 0]
    _draw_pictures(above, pictures, settings.images)
    # LPIPS is empty if it could not be computed.
    measures = [name for name in MEASURES if rows[-1][COLUMNS.index(name)] is not None]
    for axis, measure in zip(below.subplots(1, len(measures)), measures, strict=True):
        _draw_quality(axis, measure, rows, over_steps=settings.every > 0)
    return figure


def _draw_pictures(figure: SubFigure, pictures: dict[str, Tensor], columns: int) -> None:
    axes = figure.subplots(len(pictures), columns, squeeze=False)
    for axes_of_row, (title, images) in zip(axes, pictures.items(), strict=True):
        axes_of_row[0].set_title(title, loc="left", fontsize=8)
        low, high = float(images.min()), float(images.max())
        for axis in axes_of_row:
            axis.axis("off")
        for axis, image in zip(axes_of_row, images.cpu(), strict=False):
            picture = (image.permute(1, 2, 0) - low) / max(high - low, 1e-12)
            axis.imshow(picture.squeeze(-1).numpy(), cmap="gray")


def _draw_quality(
    axis: Axes, measure: str, rows: list[tuple[Any, ...]], *, over_steps: bool
) -> None:
    """Draw one measure's mean over images: one curve per run, kind of features and start."""
    position = COLUMNS.index(measure)
    last_step = max(row[4] for row in rows)
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        run, known, noise, start, step, image = row[:6]
        if image != ALL:
            continue
        label = f"{run}: {known}, {start}"
        if over_steps:
            curves.setdefault(f"{label}, noise {noise:g}", []).append((step, row[position]))
        elif step == last_step:
            curves.setdefault(label, []).append((noise, row[position]))
    for label, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axis.set(title=measure, xlabel="step" if over_steps else "noise")
    axis.legend(fontsize=6)
