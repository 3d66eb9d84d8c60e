"""The schema of a configuration: all tables of a run, with checks of combinations that cannot work.

Each settings class is defined beside the code it configures. This module puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import tomli_w
from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from motley.client.attack import ATTACKS, ActiveAttackSettings, AttackSettings
from motley.client.encoding import Encoding
from motley.client.training import TrainingSettings
from motley.config.paper_names import spelled_out
from motley.config.renames import reject_old_names
from motley.core.errors import MotleyError, unknown
from motley.core.registry import Registry
from motley.data.dataset import DATASETS
from motley.data.public import PUBLIC, PublicDatasetSettings, PublicSettings
from motley.data.settings import DataSettings
from motley.engine.base import EngineSettings
from motley.evaluate import EvaluationSettings
from motley.methods import METHODS, MethodSettings
from motley.models import MODELS, ModelSpec
from motley.models.cnn import CNNSettings
from motley.models.cnn1d import CNN1dSettings
from motley.models.factories import check_options, with_options
from motley.models.initialization import Initialization
from motley.models.lstm import LSTMSettings
from motley.models.mlp import MLPSettings
from motley.models.preact import PreActSettings
from motley.models.resnet import ResNetSettings
from motley.models.table import TableSettings
from motley.models.transformer import DecoderSettings, EncoderSettings
from motley.models.vgg import VGGSettings
from motley.models.vit import ViTSettings
from motley.privacy.settings import PrivacySettings
from motley.server.inco import INCO, IncoOff
from motley.server.merging import MERGES, MergeSettings
from motley.server.optimizer import SERVER_OPTIMIZERS, ServerOptimizerSettings
from motley.server.pipeline import STAGE, StageSettings
from motley.settings import (
    Choice,
    FilePath,
    RegistryChoice,
    Settings,
    Table,
    allowing,
    no_effect,
)
from motley.splits import SPLITS, SplitSettings
from motley.splits.private import HEAD
from motley.tasks import LOSSES, METRICS, TASKS, Task

FAMILIES = (
    "resnet",
    "vit",
    "mlp",
    "cnn",
    "vgg",
    "preact",
    "cnn1d",
    "lstm",
    "decoder",
    "encoder",
    "table",
)
#: Chosen by data.name, split.name and method.name.
DATA = RegistryChoice("digits", DATASETS, lambda reader: DataSettings)
SPLIT = RegistryChoice("depth", SPLITS, lambda split: split.Settings)
METHOD = RegistryChoice("fedavg", METHODS, lambda method: method.Settings)


class ModelSettings(Settings):
    """The models of the federation, and the settings of the families that they belong to."""

    factories: dict[str, str] = Field(default_factory=dict)
    """Short names for models of your own, for `sizes`: small = "my_package.nets:make_small"."""
    sizes: tuple[str, ...] = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
    """The models of the federation, smallest first: names (`motley list models`), names of
    `factories`, or dotted paths of your own models, "my_package.nets:make_small".
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of your own models by keyword, for those that name them. A table with the name of a
    size holds arguments of that size only.
    """
    resnet: ResNetSettings | None = None
    vit: ViTSettings | None = None
    mlp: MLPSettings | None = None
    cnn: CNNSettings | None = None
    vgg: VGGSettings | None = None
    preact: PreActSettings | None = None
    cnn1d: CNN1dSettings | None = None
    lstm: LSTMSettings | None = None
    decoder: DecoderSettings | None = None
    encoder: EncoderSettings | None = None
    table: TableSettings | None = None
    init: Initialization = "model"
    """Initial weights. model: as each model does it; ResNets and VGG11 as torchvision does,
    convolutions with variance 2 / fan_out. kaiming: that rule for any model. torch: torch's default
    for every layer, as in FedImpro's code; convolutions of a ResNet then start about 2.4 times
    smaller.
    """
    projection: int = Field(default=0, ge=0)
    """Width of a two-layer projection before the last layer, as in MOON's code (256 there); 0:
    none.
    """
    weights: FilePath = ""
    """A safetensors file with initial weights. Tensors of the initial global state that have the
    same name and shape are replaced, and a warning names the others.
    """
    allow_new_first_layer: bool = False
    """Accept a file of weights that does not fit the first layer, which then starts at random."""

    @field_validator("factories")
    @classmethod
    def _resolvable(cls, factories: dict[str, str]) -> dict[str, str]:
        registered = [entry.name for entry in MODELS]
        for name, path in factories.items():
            if name in registered:
                raise ValueError(f"{name!r} is the name of one of Motley's own models")
            _require_model(path)
        return factories

    @field_validator("sizes")
    @classmethod
    def _known(cls, sizes: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not sizes:
            raise ValueError("at least one size is needed")
        if len(set(sizes)) != len(sizes):
            raise ValueError("a size is named twice")
        factories = info.data.get("factories")
        for size in sizes:
            # If the factories are wrong themselves, they are reported.
            if factories is not None and size not in factories:
                _require_model(size)
        return sizes

    @field_validator("options")
    @classmethod
    def _taken(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        sizes, factories = info.data.get("sizes"), info.data.get("factories")
        if not options or sizes is None or factories is None:
            return options
        specs = {}
        for size in sizes:
            spec = MODELS[factories.get(size, size)]
            if spec.family not in FAMILIES:
                specs[size] = spec
        if not specs:
            raise no_effect(options, f"model.sizes = {list(sizes)}; it is for models of your own")
        shared = {key: value for key, value in options.items() if key not in specs}
        check_options(shared, specs)
        for size, spec in specs.items():
            size_options = options.get(size, {})
            if not isinstance(size_options, dict):
                raise ValueError(f"{size} should be a table of options")
            check_options(size_options, {size: spec})
            with_options(spec, {**shared, **size_options})
        return options

    @field_validator(*FAMILIES, mode="before")
    @classmethod
    def _only_of_used_families(cls, value: Any, info: ValidationInfo) -> Any:
        """Give every used family its table, and reject settings of the others."""
        sizes, family = info.data.get("sizes"), str(info.field_name)
        factories = info.data.get("factories")
        if sizes is None or factories is None:  # they are wrong themselves, and are reported
            return value
        if family in families_of(sizes, factories):
            return {} if value is None else value
        if value:
            names = ", ".join(entry.name for entry in MODELS if entry.item.family == family)
            raise no_effect(value, f"model.sizes = {list(sizes)}; it is for {names}")
        return None

    @model_serializer(mode="wrap")
    def _without_unused_families(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for key in ("factories", "options"):
            if not values.get(key):
                values.pop(key, None)
        return {key: value for key, value in values.items() if value is not None}

    def declaration(self, size: str) -> tuple[ModelSpec, Any]:
        """Return the declaration of a size, and the settings that its `build` takes."""
        spec = MODELS[self.factories.get(size, size)]
        if spec.family in FAMILIES:
            return spec, getattr(self, spec.family)
        shared = {key: value for key, value in self.options.items() if key not in self.sizes}
        return with_options(spec, {**shared, **self.options.get(size, {})})

    @classmethod
    def kept_below(cls, below: Table, above: Table) -> Table:
        """Drop the tables of models that the `sizes` of the higher layer do not use."""
        sizes = above.get("sizes")
        if isinstance(sizes, str):
            sizes = [size.strip() for size in sizes.split(",")]
        if not isinstance(sizes, list | tuple):
            return below
        factories = {}
        for layer in (below, above):
            if isinstance(layer.get("factories"), Mapping):
                factories.update(layer["factories"])
        used = families_of(sizes, factories)
        dropped = {*FAMILIES} - used
        if used <= {*FAMILIES}:
            dropped |= {"factories", "options"}
        return {key: value for key, value in below.items() if key not in dropped}


def _require_model(name: str) -> None:
    try:
        MODELS.entry(name)
    except MotleyError as error:
        raise ValueError(str(error)) from None


def families_of(sizes: Iterable[Any], factories: Mapping[str, Any]) -> set[str]:
    """Return the families of models. Names that stand for no model have none."""
    families = set()
    for size in sizes:
        name = factories.get(size, size)
        if name in MODELS:
            families.add(MODELS[name].family)
    return families


class TaskSettings(Settings):
    """The task: what models learn, and how they are compared."""

    name: str = ""
    """The task (`motley list tasks`); empty: the one that the data set names."""
    loss: str = ""
    """The loss (`motley list losses`), or a function of your own, "package.module:function": it
    takes outputs and targets and returns the loss of each row. Empty: the task's.
    """
    metrics: tuple[str, ...] = ()
    """The metrics (`motley list metrics`), or functions of your own; the first one is the primary
    metric, which tables and reports show. Empty: the task's.
    """

    @field_validator("name")
    @classmethod
    def _known_task(cls, name: str) -> str:
        return TASKS.entry(name, "task.name").name if name else name

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return LOSSES.entry(name, "task.loss").name if name else name

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(METRICS.entry(name, "task.metrics").name for name in names)

    def references(self) -> list[tuple[str, Registry[Any], str]]:
        """Return the names that are set: the key, its registry, and the name."""
        references: list[tuple[str, Registry[Any], str]] = []
        if self.name:
            references.append(("task.name", TASKS, self.name))
        if self.loss:
            references.append(("task.loss", LOSSES, self.loss))
        for metric in self.metrics:
            references.append(("task.metrics", METRICS, metric))
        return references

    def build(self, of_dataset: str) -> Task:
        """Return the task, given the name of the data set's own."""
        return TASKS.entry(self.name or of_dataset, "task.name").item.with_choices(
            self.loss, self.metrics
        )


class FederationSettings(Settings):
    """The clients: how many there are, how they are sampled, and which sizes they have."""

    clients: int = Field(default=20, ge=1)
    """Number of clients."""
    clients_per_round: int = Field(default=5, ge=1)
    """Number of clients that train in each round."""
    sampler: Literal["uniform", "fedml"] = "uniform"
    """How a round's clients are sampled. uniform: from the run's seed. fedml: from the round's
    number alone, after numpy.random.seed(number - 1), as in FedML and code built on it, such as
    FedImpro's; runs with different seeds then sample the same clients.
    """
    size_assignment: Literal["blocks", "alternate", "random", "dynamic", "budget"] = "blocks"
    """How clients get their sizes. blocks: consecutive client ids share a size (as in InCo's code).
    alternate: in turns. random: drawn once. dynamic: drawn anew for all clients in every round
    (HeteroFL's "dynamic"). budget: the largest size that fits each client's line in `budgets`.
    """
    budgets: FilePath = ""
    """A CSV file with the clients' budgets, for size_assignment = "budget". `motley plan` shows the
    resulting sizes.
    """
    size_fractions: tuple[float, ...] = ()
    """Fraction of the clients that get each size; empty: equal fractions."""
    sizes: tuple[str, ...] = ()
    """The size of every client, by client id, instead of `size_assignment` and `size_fractions`."""


class StatisticsSettings(Settings):
    """The source of BatchNorm's running statistics in the evaluated model."""

    lasting = ()

    name: Literal["averaged", "recalibrate"] = "averaged"
    """averaged: the average over the round's clients. recalibrate: clients pass their data through
    the evaluated model, and the server computes the mean and variance of all of it. Not with
    [privacy].
    """


class RecalibrationSettings(StatisticsSettings):
    """When statistics are recalibrated, and by whom."""

    name: Literal["recalibrate"] = "recalibrate"
    every: int = Field(default=0, ge=0)
    """Rounds between recalibrations; the last round always has one. 0: before each evaluation."""
    clients: Literal["all", "round"] = "all"
    """The clients that are asked in a recalibration: all of the federation, or those sampled for
    the round. Each one receives its part of the model for it.
    """


STATISTICS = Choice(
    "averaged", {"averaged": StatisticsSettings, "recalibrate": RecalibrationSettings}
)


MaxNorm: TypeAlias = Annotated[
    Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["off", "auto"],
    allowing('a number, 0 or "off" for no limit, or "auto"'),
]


class ServerSettings(Settings):
    """How the server combines the clients' deltas."""

    weighting: Literal["uniform", "samples"] = "uniform"
    """Clients' weights in the average. uniform: equal. samples: proportional to their numbers of
    examples.
    """
    merge: Annotated[SerializeAsAny[MergeSettings], MERGES] = MergeSettings()
    delta_scale: float = Field(default=1.0, gt=0)
    """Factor on the averaged delta before InCo and the server optimizer. InCo's authors divide the
    deltas of ViTs by their 5 local epochs: 0.2.
    """
    lr: float = Field(default=1.0, gt=0)
    """Server learning rate: a factor on the averaged delta after InCo and the server optimizer."""
    optimizer: Annotated[SerializeAsAny[ServerOptimizerSettings], SERVER_OPTIMIZERS] = (
        ServerOptimizerSettings()
    )
    inco: Annotated[SerializeAsAny[IncoOff], INCO] = IncoOff()
    stages: tuple[Annotated[SerializeAsAny[StageSettings], STAGE], ...] = ()
    """Stages of your own in the aggregation, each a table: [[server.stages]] with the dotted path
    of its class as `name`, the stage that it runs `before` (default: "apply"), and its settings.
    """
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average (EMA) of the global model over rounds. The average is
    evaluated; clients still train from the global model itself. 0: off.
    """
    statistics: Annotated[SerializeAsAny[StatisticsSettings], STATISTICS] = StatisticsSettings()
    max_norm: MaxNorm = "off"
    """Largest norm of a client's delta over its parameters. auto: `max_norm_factor` times the
    median of the norms that were accepted from clients of its size; in the first rounds, of the
    norms of the round. Buffers and payloads are then limited in the same way. `motley deploy init`
    writes auto.
    """
    max_norm_factor: float = Field(default=3.0, gt=1)
    """For max_norm = "auto": the multiple of the median norm that is accepted."""
    norm_action: Literal["clip", "reject"] = "clip"
    """The treatment of an update beyond `max_norm`. clip: it is scaled down to the limit, unless it
    is a hundred times as long. reject: it does not count.
    """
    max_step_factor: float = Field(default=30.0, ge=0)
    """The step of the global state is at most this many times as long as the median of its last 20
    steps, or in the first rounds as its parameters. Beyond it, or if the state is not finite, the
    round is undone and ended without the responsible clients. 0: any finite step.
    """
    max_examples: int = Field(default=10_000_000, ge=1)
    """Largest number of examples that a deployed node may claim to have."""
    max_loss: float = Field(default=1e12, gt=0)
    """Largest absolute training loss that a deployed node may report."""
    min_fraction: float = Field(default=0.2, ge=0, le=1)
    """Fraction of a round's clients whose updates must be accepted. With fewer, the round is
    repeated with newly sampled clients. Clients without examples count as accepted.
    """
    attempts: int = Field(default=3, ge=1)
    """Number of attempts at a round (see `min_fraction`) before the run stops with an error."""

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if not values.get("stages"):
            values.pop("stages", None)
        return values


class UplinkSettings(Settings):
    """How deltas travel to the server."""

    noise: float = Field(default=0.0, ge=0)
    """Noise on every parameter's delta on its way to the server, as a multiple of the delta's
    standard deviation (InCo, Figure 7).
    """
    dtype: Encoding = "fp32"
    """Data type in which deltas are sent. fp16 and bf16 halve the upload; the rounding error is
    kept and added to the client's next delta (error feedback).
    """


class RunSettings(Settings):
    """Which files a run keeps."""

    checkpoint_every: int = Field(default=10, ge=1)
    """Rounds between checkpoints. The last round and an interrupted run are always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints that are kept."""
    tensorboard: bool = True
    """Write TensorBoard event files, if tensorboard is installed."""
    mlflow: bool | str = False
    """Log to MLflow (extra `mlflow`). true: to $MLFLOW_TRACKING_URI or, if that is not set, to the
    database mlflow.db beside the run's folder. A text: a tracking URI, such as
    "http://127.0.0.1:5000" or "sqlite:///mlflow.db".
    """
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases (extra `wandb`). offline: to files in the run's folder, for
    `wandb sync`. online: to the server.
    """


def with_default_split(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete the split as a method needs it.

    A method that exchanges no weights shares no layers, so its models may be unrelated: "grouped"
    allows that, if no split is named. If a method needs private tensors and none are named, the
    head is private.
    """
    method, split = values.get("method"), values.get("split", {})
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or name not in METHODS or not isinstance(split, Mapping):
        return values  # an unknown method is reported with the table's other errors
    needs = METHODS[name].requirements
    if not needs.exchanges_weights:
        split = {"name": "grouped", **split}
    if needs.needs_private_parts and not split.get("private"):
        split = {**split, "private": [HEAD]}
    return {**values, "split": split} if split else values


class Config(Settings):
    """The whole configuration of a run."""

    preset: str = ""
    """The preset that the values started from; it is recorded with the run."""
    seed: int = Field(default=1, ge=0)
    """Seed of every random choice. Runs with the same seed share partition, client sampling and
    initial weights.
    """
    data: Annotated[DataSettings, DATA] = Field(
        default_factory=lambda: DataSettings.model_validate({})
    )
    public: Annotated[SerializeAsAny[PublicSettings], PUBLIC] = PublicSettings()
    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    split: Annotated[SerializeAsAny[SplitSettings], SPLIT] = SplitSettings()
    federation: FederationSettings = FederationSettings()
    training: TrainingSettings = TrainingSettings()
    method: Annotated[SerializeAsAny[MethodSettings], METHOD] = MethodSettings()
    uplink: UplinkSettings = UplinkSettings()
    privacy: PrivacySettings = PrivacySettings()
    attack: Annotated[SerializeAsAny[AttackSettings], ATTACKS] = AttackSettings()
    server: ServerSettings = ServerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: EngineSettings = EngineSettings()
    run: RunSettings = RunSettings()

    @property
    def method_label(self) -> str:
        """The method's name, and InCo's variant if InCo runs on top of it."""
        label = self.method.name
        if self.split.private:
            label += f", private {' and '.join(self.split.private)}"
        inco = self.server.inco
        return f"{label} + InCo ({inco.variant})" if inco.active else label

    @property
    def has_own_models(self) -> bool:
        """Whether clients' own models are evaluated, and not the global model."""
        requirements = METHODS[self.method.name].requirements
        return requirements.has_own_models(bool(self.split.private))

    @property
    def reveals_scores(self) -> bool:
        """Whether clients report scores that epsilon does not cover."""
        privacy = self.privacy
        asks_clients = self.has_own_models or self.evaluation.per_client != "off"
        return privacy.active and privacy.reveal_scores and asks_clients

    @model_validator(mode="before")
    @classmethod
    def _names_spelled_out(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        reject_old_names(values)
        return with_default_split(spelled_out(values, {}))

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        self._check_clients()
        self._check_sizes()
        self._check_method()
        self._check_public()
        self._check_merge()
        self._check_attack()
        if self.privacy.active:
            self._check_privacy()
        return self

    def _check_clients(self) -> None:
        federation = self.federation
        sizes = self.split.sizes(self.model.sizes)
        if federation.clients_per_round > federation.clients:
            raise MotleyError(
                f"federation.clients_per_round = {federation.clients_per_round}: there are only "
                f"federation.clients = {federation.clients} clients."
            )
        if len(sizes) > federation.clients:
            raise MotleyError(
                f"federation.clients = {federation.clients}: fewer than the {len(sizes)} sizes."
            )
        if federation.sizes and len(federation.sizes) != federation.clients:
            raise MotleyError(
                f"federation.sizes has {len(federation.sizes)} sizes; federation.clients = "
                f"{federation.clients}."
            )
        unknown_sizes = sorted(set(federation.sizes) - set(sizes))
        if unknown_sizes:
            raise MotleyError(f"federation.sizes: {unknown('size', unknown_sizes[0], sizes)}")

    def _check_sizes(self) -> None:
        federation = self.federation
        count = len(self.split.sizes(self.model.sizes))
        fractions = list(federation.size_fractions)
        if fractions:
            setting = f"federation.size_fractions = {fractions}"
            if len(fractions) != count:
                raise MotleyError(f"{setting}: {count} fractions are needed, one per size.")
            if min(fractions) < 0:
                raise MotleyError(f"{setting}: fractions must not be negative.")
            if sum(fractions) == 0:
                raise MotleyError(f"{setting}: at least one fraction must be above 0.")
        if federation.size_assignment == "budget" and not federation.budgets:
            raise MotleyError(
                "federation.size_assignment = 'budget': needs federation.budgets, a CSV file with "
                "one line per client."
            )
        if federation.budgets and federation.size_assignment != "budget":
            raise MotleyError(
                f"federation.budgets = {federation.budgets!r}: is only used with "
                "federation.size_assignment = 'budget'; it is "
                f"{federation.size_assignment!r}."
            )

    def _check_method(self) -> None:
        method = self.method.name
        self._check_client_scores()
        if self.evaluation.clients == "all" and not self.has_own_models:
            raise MotleyError(
                "evaluation.clients = 'all': is for methods that exchange no weights or train "
                f"personal models, and for split.private; with {method!r} the global model is "
                "evaluated. Leave it out."
            )
        if METHODS[method].requirements.exchanges_weights:
            self._check_private()
            return
        delta, model = "no delta to work on", "no global model"
        # The setting, its value, its neutral value, and why it would have no effect.
        without_effect: list[tuple[str, object, object, str]] = [
            ("server.inco.variant", self.server.inco.variant, "off", delta),
            ("server.optimizer.name", self.server.optimizer.name, "none", delta),
            ("server.stages", self.server.stages, (), delta),
            ("server.lr", self.server.lr, 1.0, delta),
            ("server.delta_scale", self.server.delta_scale, 1.0, delta),
            ("server.weighting", self.server.weighting, "uniform", delta),
            ("server.merge.name", self.server.merge.name, "mean", delta),
            ("server.ema_decay", self.server.ema_decay, 0.0, model),
            ("server.statistics.name", self.server.statistics.name, "averaged", model),
            ("uplink.noise", self.uplink.noise, 0.0, delta),
            ("uplink.dtype", self.uplink.dtype, "fp32", delta),
            ("privacy.clip", self.privacy.clip, 0.0, delta),
            ("split.private", list(self.split.private), [], "nothing that is shared"),
        ]
        problems = []
        for key, value, neutral, missing in without_effect:
            if value != neutral:
                problems.append(
                    f"{key} = {value!r}: {method!r} exchanges no weights, so there is {missing}. "
                    f"Use {key} = {neutral!r}."
                )
        if problems:
            raise MotleyError("\n".join(problems))

    def _check_private(self) -> None:
        name, private = self.method.name, list(self.split.private)
        if not private or METHODS[name].requirements.private_parts:
            return
        able = [repr(entry.name) for entry in METHODS if entry.item.requirements.private_parts]
        reason = "uses whole models, or features and statistics of them, at the server"
        if METHODS[name].requirements.personal_model:
            reason = "keeps a whole personal model at every client already"
        raise MotleyError(
            f"split.private = {private}: method.name = {name!r} {reason}. "
            f"Methods for private tensors are {', '.join(able)}."
        )

    def _check_client_scores(self) -> None:
        evaluation = self.evaluation
        if not evaluation.personalize_epochs:
            return
        setting = f"evaluation.personalize_epochs = {evaluation.personalize_epochs:g}"
        if evaluation.per_client == "off":
            raise MotleyError(
                f"{setting}: is for the scores of clients. Set evaluation.per_client to 'round' or "
                "'all'."
            )

    def _check_public(self) -> None:
        name, public = self.method.name, self.public
        needs_public = METHODS[name].requirements.public_data
        if needs_public and not public.active:
            sources = [repr(source) for source in PUBLIC.classes if source != "none"]
            raise MotleyError(
                f"method.name = {name!r}: needs public images. Set public.name to one of "
                f"{', '.join(sources)}."
            )
        if public.active and not needs_public:
            users = [repr(entry.name) for entry in METHODS if entry.item.requirements.public_data]
            raise MotleyError(
                f"public.name = {public.name!r}: has no effect with method.name = {name!r}; "
                f"it is for {', '.join(users)}."
            )
        if isinstance(public, PublicDatasetSettings) and self._is_private_data(public):
            raise MotleyError(
                f"public.name = {public.name!r}: is the clients' own data set. Use public.name = "
                "'held-out', which takes training examples that no client gets, or another one."
            )

    def _is_private_data(self, public: PublicDatasetSettings) -> bool:
        """Tell whether the public data set is the one that the clients train on."""
        if public.name != self.data.name or public.path != self.data.path:
            return False
        # On a node, neither of two files of the user's own has a path here, and they may differ.
        is_users_file = public.name in ("npz", "files")
        return bool(public.path) or not is_users_file

    def _check_merge(self) -> None:
        merge = self.server.merge.name
        if merge == "mean":
            return
        setting = f"server.merge.name = {merge!r}"
        if self.server.weighting != "uniform":
            raise MotleyError(
                f"server.weighting = {self.server.weighting!r}: {setting} counts every client "
                "once. Use server.weighting = 'uniform'."
            )
        if self.privacy.active:
            raise MotleyError(
                f"{setting}: epsilon for privacy.clip = {self.privacy.clip:g} is computed for a "
                "mean of noised deltas. Use server.merge.name = 'mean'."
            )
        requirements = METHODS[self.method.name].requirements
        if requirements.own_aggregation and not requirements.robust_merge:
            able = []
            for entry in METHODS:
                needs = entry.item.requirements
                if needs.exchanges_weights and (not needs.own_aggregation or needs.robust_merge):
                    able.append(repr(entry.name))
            raise MotleyError(
                f"{setting}: method.name = {self.method.name!r} combines what clients send in its "
                f"own way, which the rule would not protect. Methods that use it are "
                f"{', '.join(able)}."
            )
        if merge == "krum" and getattr(self.split, "channels", "") == "random":
            raise MotleyError(
                f"{setting}: compares deltas of clients with the same part, and split.channels = "
                "'random' gives every client another one. Use 'median' or 'trimmed-mean'."
            )

    def _check_attack(self) -> None:
        attack = self.attack
        if not isinstance(attack, ActiveAttackSettings):
            return
        setting = f"attack.name = {attack.name!r}"
        if self.engine.name.startswith("flower"):
            raise MotleyError(
                f"{setting}: attacks are simulated in this process only, and engine.name = "
                f"{self.engine.name!r} runs clients as nodes. Use attack.name = 'none'."
            )
        clients = self.federation.clients
        if max(attack.clients, default=0) >= clients:
            raise MotleyError(
                f"attack.clients = {list(attack.clients)}: client ids go from 0 to {clients - 1} "
                f"(federation.clients = {clients})."
            )
        exchanges_weights = METHODS[self.method.name].requirements.exchanges_weights
        if not exchanges_weights and attack.name != "label-flip":
            raise MotleyError(
                f"{setting}: changes deltas, and method.name = {self.method.name!r} exchanges no "
                "weights. Use attack.name = 'label-flip'."
            )

    def _check_privacy(self) -> None:
        clip = f"privacy.clip = {self.privacy.clip:g}"
        if self.server.weighting != "uniform":
            raise MotleyError(
                f"server.weighting = {self.server.weighting!r}: with {clip} clients do not report "
                "how many examples they have. Use server.weighting = 'uniform'."
            )
        if self.federation.sampler == "fedml":
            raise MotleyError(
                f"federation.sampler = 'fedml': the guarantee of {clip} assumes that nobody knows "
                "which clients take part in a round. Use federation.sampler = 'uniform'."
            )
        max_norm = self.server.max_norm
        if isinstance(max_norm, float) and max_norm > 0:
            raise MotleyError(
                f"server.max_norm = {max_norm:g}: epsilon for {clip} is computed for a mean of "
                "noised deltas, and scaling some of them down changes their noise. Use "
                "server.max_norm = 'auto' or 'off'; the server verifies privacy.clip in any case."
            )
        if self.uplink.dtype != "fp32":
            raise MotleyError(
                f"uplink.dtype = {self.uplink.dtype!r}: the cost of {clip} is known for deltas "
                "that are not rounded. Use uplink.dtype = 'fp32'."
            )

    def to_toml(self) -> str:
        """Return the whole configuration, every default written out."""
        return tomli_w.dumps(self.model_dump(mode="json"))
