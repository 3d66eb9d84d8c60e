"""One TOML file is one run: the whole configuration, typed, checked, and resolved before anything starts.

Each settings class is defined beside the code it configures. This module puts them together, fills in presets and
overrides, and rejects combinations that cannot work.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from motley.client.encoding import Encoding
from motley.client.training import TrainingSettings
from motley.core.errors import MotleyError, unknown
from motley.data.settings import DataSettings
from motley.engine.base import EngineSettings
from motley.evaluate import EvaluationSettings
from motley.methods import METHODS, MethodSettings
from motley.methods.names import spelled_out
from motley.models import MODELS
from motley.models.cnn import CNNSettings
from motley.models.mlp import MLPSettings
from motley.models.preact import PreActSettings
from motley.models.resnet import ResNetSettings
from motley.models.vgg import VGGSettings
from motley.models.vit import ViTSettings
from motley.privacy.settings import PrivacySettings
from motley.renames import reject_old_names, with_new_names
from motley.server.optimizer import ServerOptimizerSettings
from motley.settings import Settings, validate
from motley.splits import SPLITS, SplitSettings

DEFAULT_PRESET = "quickstart"


class ModelSettings(Settings):
    """The models of the federation, and the settings of their families."""

    sizes: tuple[str, ...] = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
    """The models of the federation, smallest first (`motley list models`)."""
    resnet: ResNetSettings = ResNetSettings()
    vit: ViTSettings = ViTSettings()
    mlp: MLPSettings = MLPSettings()
    cnn: CNNSettings = CNNSettings()
    vgg: VGGSettings = VGGSettings()
    preact: PreActSettings = PreActSettings()
    projection: int = Field(default=0, ge=0)
    """Width of a two-layer projection before the last layer, as in MOON's code (256 there); 0: none."""
    weights: str = ""
    """A safetensors file with initial weights. Tensors of the initial global state that have the same name and shape
    are replaced.
    """

    @field_validator("sizes")
    @classmethod
    def _known(cls, sizes: tuple[str, ...]) -> tuple[str, ...]:
        if not sizes:
            raise ValueError("at least one size is needed")
        if len(set(sizes)) != len(sizes):
            raise ValueError("a size is named twice")
        for size in sizes:
            if size not in MODELS:
                raise ValueError(unknown("model", size, (entry.name for entry in MODELS)))
        return sizes


class FederationSettings(Settings):
    """The clients: how many there are, how they are sampled, and which sizes they have."""

    clients: int = Field(default=20, ge=1)
    """Number of clients."""
    clients_per_round: int = Field(default=5, ge=1)
    """Number of clients that train in each round."""
    sampler: Literal["uniform", "fedml"] = "uniform"
    """How a round's clients are sampled. uniform: from the run's seed. fedml: from the round's number alone, after
    numpy.random.seed(number - 1), as in FedML and code built on it, such as FedImpro's; runs with different seeds then
    sample the same clients.
    """
    size_assignment: Literal["blocks", "alternate", "random", "dynamic", "budget"] = "blocks"
    """How clients get their sizes. blocks: consecutive client ids share a size (as in InCo's code). alternate: in
    turns. random: drawn once. dynamic: drawn anew for all clients in every round (HeteroFL's "dynamic"). budget: the
    largest size that fits each client's line in `budgets`.
    """
    budgets: str = ""
    """A CSV file with the clients' budgets, for size_assignment = "budget". `motley plan` shows the resulting sizes."""
    size_fractions: tuple[float, ...] = ()
    """Fraction of the clients that get each size; empty: equal fractions."""
    sizes: tuple[str, ...] = ()
    """The size of every client, by client id, instead of `size_assignment` and `size_fractions`."""


class ServerSettings(Settings):
    """How the server combines the clients' deltas."""

    weighting: Literal["uniform", "samples"] = "uniform"
    """Clients' weights in the average. uniform: equal. samples: proportional to their numbers of examples."""
    lr: float = Field(default=1.0, gt=0)
    """Server learning rate: a factor on the averaged delta."""
    optimizer: ServerOptimizerSettings = ServerOptimizerSettings()
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average (EMA) of the global model over rounds. The average is evaluated; clients
    still train from the global model itself. 0: off.
    """
    statistics: Literal["averaged", "recalibrate"] = "averaged"
    """Source of BatchNorm's running statistics in the evaluated model. averaged: the average over the round's clients.
    recalibrate: clients pass their data through the evaluated model, and the server computes the mean and variance of
    all of it. Not with [privacy].
    """
    statistics_every: int = Field(default=0, ge=0)
    """Rounds between recalibrations; the last round always has one. 0: before each evaluation."""
    statistics_clients: Literal["all", "round"] = "all"
    """The clients that are asked in a recalibration: all of the federation, or those sampled for the round. Each one
    receives its part of the model for it.
    """
    min_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of a round's clients whose updates must be accepted. With fewer, the round is repeated with newly
    sampled clients.
    """
    attempts: int = Field(default=3, ge=1)
    """Number of attempts at a round (see `min_fraction`) before the run stops with an error."""


class UplinkSettings(Settings):
    """How deltas travel to the server."""

    noise: float = Field(default=0.0, ge=0)
    """Noise on every parameter's delta on its way to the server, as a multiple of the delta's standard deviation
    (InCo, Figure 7).
    """
    dtype: Encoding = "fp32"
    """Data type in which deltas are sent. fp16 and bf16 halve the upload; the rounding error is kept and added to the
    client's next delta (error feedback).
    """


class RunSettings(Settings):
    """Which files a run keeps."""

    checkpoint_every: int = Field(default=10, ge=1)
    """Rounds between checkpoints. The last round and an interrupted run are always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints that are kept."""
    tensorboard: bool = True
    """Write TensorBoard event files, if tensorboard is installed."""


class Config(Settings):
    """The whole configuration of a run."""

    preset: str = ""
    """The preset that the values started from; it is recorded with the run."""
    seed: int = Field(default=1, ge=0)
    """Seed of every random choice. Runs with the same seed share partition, client sampling and initial weights."""
    data: DataSettings = Field(default_factory=lambda: DataSettings.model_validate({}))
    model: ModelSettings = ModelSettings()
    split: SerializeAsAny[SplitSettings] = SplitSettings()
    federation: FederationSettings = FederationSettings()
    training: TrainingSettings = TrainingSettings()
    method: SerializeAsAny[MethodSettings] = MethodSettings()
    uplink: UplinkSettings = UplinkSettings()
    privacy: PrivacySettings = PrivacySettings()
    server: ServerSettings = ServerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: EngineSettings = EngineSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="before")
    @classmethod
    def _names_spelled_out(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        reject_old_names(values)
        return spelled_out(values, {})

    @field_validator("method", mode="before")
    @classmethod
    def _chosen_method(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        entry = METHODS.entry(str(value.get("name", "fedavg")), "method.name")
        return validate(entry.item.Settings, {**value, "name": entry.name}, where="method")

    @field_validator("split", mode="before")
    @classmethod
    def _chosen_split(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        entry = SPLITS.entry(str(value.get("name", "depth")), "split.name")
        return validate(entry.item.Settings, {**value, "name": entry.name}, where="split")

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        federation, method = self.federation, self.method
        sizes = self.split.sizes(self.model.sizes)
        if federation.clients_per_round > federation.clients:
            raise MotleyError(
                f"federation.clients_per_round = {federation.clients_per_round}: there are only "
                f"federation.clients = {federation.clients} clients."
            )
        if len(sizes) > federation.clients:
            raise MotleyError(f"federation.clients = {federation.clients}: fewer than the {len(sizes)} sizes.")
        if federation.size_fractions and len(federation.size_fractions) != len(sizes):
            raise MotleyError(
                f"federation.size_fractions = {list(federation.size_fractions)}: {len(sizes)} fractions are needed, "
                "one per size."
            )
        if federation.size_assignment == "budget" and not federation.budgets:
            raise MotleyError(
                "federation.size_assignment = 'budget': needs federation.budgets, a CSV file with one line per client."
            )
        if federation.budgets and federation.size_assignment != "budget":
            raise MotleyError(
                f"federation.budgets = {federation.budgets!r}: is only used with federation.size_assignment = "
                f"'budget'; it is {federation.size_assignment!r}."
            )
        if federation.size_fractions and min(federation.size_fractions) < 0:
            raise MotleyError(
                f"federation.size_fractions = {list(federation.size_fractions)}: fractions must not be negative."
            )
        if federation.size_fractions and sum(federation.size_fractions) == 0:
            raise MotleyError(
                f"federation.size_fractions = {list(federation.size_fractions)}: at least one fraction must be above 0."
            )
        if federation.sizes and len(federation.sizes) != federation.clients:
            raise MotleyError(
                f"federation.sizes has {len(federation.sizes)} sizes; federation.clients = {federation.clients}."
            )
        if odd := sorted(set(federation.sizes) - set(sizes)):
            raise MotleyError(f"federation.sizes: {unknown('size', odd[0], sizes)}")
        if method.inco.active and not METHODS[method.name].requirements.exchanges_weights:
            raise MotleyError(
                f"method.inco.preset = {method.inco.preset!r}: {method.name!r} exchanges no weights, so there is no "
                "change to work on. Use method.inco.preset = 'off'."
            )
        if self.privacy.active and self.server.weighting != "uniform":
            raise MotleyError(
                f"server.weighting = {self.server.weighting!r}: with privacy.clip = {self.privacy.clip:g} clients do "
                "not say how many examples they have. Use server.weighting = 'uniform'."
            )
        if self.privacy.active and federation.sampler == "fedml":
            raise MotleyError(
                f"federation.sampler = 'fedml': privacy.clip = {self.privacy.clip:g} counts on nobody knowing who "
                "takes part in a round. Use federation.sampler = 'uniform'."
            )
        if self.privacy.active and self.uplink.dtype != "fp32":
            raise MotleyError(
                f"uplink.dtype = {self.uplink.dtype!r}: what privacy.clip = {self.privacy.clip:g} costs is known "
                "for changes that are not rounded. Use uplink.dtype = 'fp32'."
            )
        return self

    def to_toml(self) -> str:
        """Return the whole configuration, every default written out."""
        return tomli_w.dumps(self.model_dump(mode="json"))


def load_config(file: Path | None = None, *, preset: str = "", overrides: Iterable[str] = ()) -> Config:
    """Read a run's configuration: a preset, then a TOML file on top, then `a.b=c` overrides.

    Relative paths in the file start from the file's folder, those in overrides from the working folder. The result has
    absolute paths only, so that a run can be resumed from any folder.
    """
    given = absolute_paths(read_toml(file), file.parent) if file else {}
    chosen = parse_overrides(overrides)
    preset = str(chosen.get("preset") or preset or given.get("preset") or ("" if file else DEFAULT_PRESET))
    return resolve(preset, [given, chosen])


def resolve(preset: str, layers: Iterable[Table]) -> Config:
    """Return the configuration of a preset with layers of settings on it, each above those before it."""
    values: dict[str, Any] = {}
    for layer in (_preset_values(preset) if preset else {}, *layers):
        reject_old_names(layer)
        values = _overlay(values, spelled_out(layer, values))
    return validate(Config, absolute_paths({**values, "preset": preset}, Path()))


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return `a.b=c` overrides as one layer of settings; of two for one key the later counts."""
    chosen: dict[str, Any] = {}
    for override in overrides:
        chosen = _overlay(chosen, _parse_override(override), _all)
    return chosen


def presets() -> dict[str, str]:
    """Return every preset's name and the comment on its first line."""
    files = sorted(resources.files("motley.presets").iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        for file in files
        if file.name.endswith(".toml")
    }


def _preset_values(name: str) -> dict[str, Any]:
    if name not in presets():
        raise MotleyError(unknown("preset", name, presets()))
    return tomllib.loads((resources.files("motley.presets") / f"{name}.toml").read_text(encoding="utf-8"))


def read_toml(file: Path) -> dict[str, Any]:
    """Return what a TOML file says; one that cannot be read is refused by name."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MotleyError(f"{file}: there is no such configuration file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise MotleyError(f"{file}: is not valid TOML: {error}.") from None


#: The settings that name a file or a folder. A Flower node takes none of them from a server.
PATH_SETTINGS = (
    ("data", "path"),
    ("data", "root"),
    ("data", "partition", "path"),
    ("model", "weights"),
    ("federation", "budgets"),
)


def absolute_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a layer of settings in which relative paths, taken to start from `folder`, have become absolute."""
    result = copy.deepcopy(dict(values))
    for *tables, name in PATH_SETTINGS:
        table: Any = result
        for step in tables:
            table = table.get(step) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(table.get(name), str) and table[name]:
            table[name] = str((folder / Path(table[name]).expanduser()).absolute())
    return result


def _parse_override(text: str) -> dict[str, Any]:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or not all(name.split(".")):
        raise MotleyError(f"--set {text!r}: write it as table.key=value, for example training.rounds=20.")
    parsed = _parse_value(value)
    for step in reversed(name.split(".")):
        parsed = {step: parsed}
    return parsed


def _parse_value(text: str) -> Any:
    """Return a value as TOML has it. Quotes may be missing, since a shell removes them: word, or [word, word]."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        inside = text[1:-1]
        if text.startswith("[") and text.endswith("]") and not set(inside) & set("[]{}"):
            return [_parse_value(item.strip()) for item in inside.split(",") if item.strip()]
        return text


_CHOOSERS = {
    "data": {"name": "digits"},
    "split": {"name": "depth"},
    "method": {"name": "fedavg", "preset": "paper"},
    "data.partition": {"name": "dirichlet"},
    "method.inco": {"preset": "off"},
    "data.transform": {"preset": "plain"},
    "server.optimizer": {"name": "none"},
}
"""Tables whose other keys belong to what these keys choose, and what is chosen where nothing is said."""

Table = Mapping[str, Any]


def _all(name: str, old: Table, new: Table) -> Table:
    return old


def _fitting(name: str, old: Table, new: Table) -> Table:
    """Return what of a table outlives a choice made anew (another method, another preset of InCo): tables inside.

    Another data set takes over where data sets lie and how samples are dealt, and of the transform only its preset;
    another split what holds for every split.
    """
    choosers = _CHOOSERS.get(name, {})
    before = {key: old.get(key, default) for key, default in choosers.items()}
    chosen_anew = [key for key in choosers if new.get(key, before[key]) != before[key]]
    if not chosen_anew:
        return old
    if name == "split":
        return {key: value for key, value in old.items() if key in SplitSettings.model_fields}
    if name != "data":
        above = list(choosers)[: list(choosers).index(chosen_anew[0])]
        return {key: value for key, value in old.items() if isinstance(value, Mapping) or key in above}
    kept = {key: value for key, value in old.items() if key != "path"}
    transform = kept.get("transform")
    if isinstance(transform, Mapping):
        kept["transform"] = {key: value for key, value in transform.items() if key == "preset"}
    return kept


def _overlay(
    below: Table, above: Table, keep: Callable[[str, Table, Table], Table] = _fitting, where: str = ""
) -> dict[str, Any]:
    """Return `below` with `above` on top, table by table; `keep` says what stays of a table that gets new values."""
    result = dict(below)
    for name, value in above.items():
        old, path = result.get(name), f"{where}{name}"
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _overlay(keep(path, old, value), value, keep, f"{path}.")
        result[name] = value
    return result


def read_resolved(file: Path) -> Config:
    """Read a configuration that was saved with a run. It is complete, and may have the setting names of its time."""
    return validate(Config, with_new_names(read_toml(file)))
