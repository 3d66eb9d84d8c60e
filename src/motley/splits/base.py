"""The base class of splits: sizes, a model per size, parts of the global state, initial state."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from motley.core.dotted import check_arguments, describe, subclass_of
from motley.core.errors import MotleyError
from motley.core.meta import on_meta
from motley.core.part import Part, Piece, State
from motley.core.randomness import torch_seed
from motley.core.registry import Registry
from motley.limits import allocating
from motley.models import CrossLayer, ModelSpec
from motley.models.facts import cross_layers_of
from motley.models.same_shape import same_shape_layers
from motley.models.spec import spec_of
from motley.models.tied import second_names
from motley.settings import Settings
from motley.splits.private import private_names

#: Module prefix of Motley's own models, including those that a split derives from them.
OWN_MODELS = "motley."
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class SplitSettings(Settings):
    """How the sizes share the global state."""

    lasting = ("normalization_statistics", "private")

    name: str = "depth"
    """How sizes share the global state (`motley list splits`), or your own by its dotted path."""
    normalization_statistics: Literal["shared", "per-size", "batch"] = "shared"
    """shared: running statistics are averaged over all sizes, as in the papers. per-size: weights
    are shared and running statistics are not. batch: there are none, and test batches are
    normalized by their own statistics (FedRolex, ScaleFL), so that accuracy depends on
    evaluation.batch_size.
    """
    private: tuple[str, ...] = ()
    """The tensors that every client keeps for itself and never sends: head (FedPer), body
    (LG-FedAvg), normalization (FedBN), or names of tensors or modules, in which * and ? match any
    characters. The rest is shared. There is no global model then, and clients' models are
    evaluated.
    """

    def sizes(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the sizes that the split derives from these architectures."""
        return architectures

    def whole(self, architectures: tuple[str, ...]) -> str | None:
        """Return the size that is the whole global model, if there is one."""
        return architectures[0] if len(architectures) == 1 else None


@dataclass(frozen=True)
class Blueprint:
    """A size's model on torch's meta device: names and shapes, without memory for values."""

    build: Callable[[], nn.Module]
    module: nn.Module
    #: Returns the pairs that InCo mixes. It is called when they are needed: inferring them takes
    #: time.
    find_cross_layers: Callable[[], Sequence[CrossLayer]]

    @classmethod
    def of(cls, name: str, build: Callable[[], nn.Module]) -> Blueprint:
        """Draw up the blueprint of an architecture."""
        module = build_on_meta(name, build)
        return cls(build, module, cache(partial(cross_layers_of, module)))

    @property
    def cross_layers(self) -> tuple[CrossLayer, ...]:
        """The pairs of parameters that InCo mixes."""
        return tuple(self.find_cross_layers())

    @property
    def spec(self) -> ModelSpec:
        """The declaration of the model."""
        return spec_of(self.module)

    @property
    def family(self) -> str:
        """The family of the model."""
        return self.spec.family


def build_on_meta(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device.

    Users' models can raise anything, so errors are raised again with the model's name.
    """
    try:
        with allocating(f"model.sizes: {name!r}"):
            module = _built_without_values(build)
    except MotleyError:
        raise
    except Exception as error:
        reason, _, _ = str(error).partition("\n")  # torch adds the frames of its C++ code
        raise MotleyError(
            f"model.sizes: {name!r} cannot be built: {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(module, nn.Module):
        actual = type(module).__name__
        raise MotleyError(
            f"model.sizes: {name!r} is built as a {actual}, not as a torch.nn.Module."
        )
    for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise MotleyError(
                f"model.sizes: {name!r} has a lazy layer, whose {tensor_name!r} has no shape yet. "
                "Give the layer the number of its inputs (Linear instead of LazyLinear): names and "
                "shapes must be known beforehand."
            )
    return module


def _built_without_values(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with on_meta(), warnings.catch_warnings():
            # A factory that loads weights is right to do so: they count when it is called again for
            # the initial state.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            return build()
    except MotleyError:
        raise
    except Exception:
        # Some models compute their widths with tensors while they are built, as torchvision's
        # RegNets do, and the meta device has no values. Such a model is built in memory first.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            module = build()
        return module.to("meta") if isinstance(module, nn.Module) else module


class Split(ABC):
    """The sizes of a federation and the part of the global state that each holds."""

    Settings: ClassVar[type[SplitSettings]] = SplitSettings

    def __init__(
        self, builds: Mapping[str, Callable[[], nn.Module]], settings: SplitSettings, seed: int = 0
    ) -> None:
        self.settings, self.seed = settings, seed
        if settings.normalization_statistics == "batch":
            builds = {name: partial(_without_statistics, build) for name, build in builds.items()}
        self.blueprints = self.draw_up(builds)
        self.sizes = tuple(self.blueprints)
        modules = {size: blueprint.module for size, blueprint in self.blueprints.items()}
        #: Size -> the names of its tensors that are no part of the global state: each client has
        #: its own.
        self.private = private_names(settings.private, modules)
        self.check()
        self._check_tied()

    def draw_up(self, builds: Mapping[str, Callable[[], nn.Module]]) -> dict[str, Blueprint]:
        """Return the blueprint of every size. Here each architecture is a size."""
        return {size: Blueprint.of(size, build) for size, build in builds.items()}

    @abstractmethod
    def global_name(self, size: str, name: str) -> str:
        """Return the global name of a tensor of a size."""

    def check(self) -> None:
        """Reject sizes that cannot be parts of one state."""
        shapes: dict[str, tuple[str, torch.Size]] = {}
        for size, blueprint in self.blueprints.items():
            for name, tensor in blueprint.module.state_dict().items():
                if name in self.private[size]:
                    continue
                place = self._global_name(size, name)
                other, shape = shapes.setdefault(place, (size, tensor.shape))
                if shape != tensor.shape:
                    raise MotleyError(
                        f"model.sizes: {other!r} and {size!r} cannot share {name!r}: "
                        f"{tuple(shape)} against {tuple(tensor.shape)}. Use split.name = "
                        "'grouped', which shares nothing between sizes."
                    )

    def build(self, size: str) -> nn.Module:
        """Return a new module of a size, to copy a state into. Its own weights are meaningless.

        The split itself holds no weights, so a client only needs memory for the module it asks for.
        """
        blueprint = self.blueprints[size].module
        if not is_described_by_its_state(blueprint):
            return self._initialized(size, seed=0)
        with torch.no_grad(), allocating("model.sizes: a model with its weights"):
            model = copy.deepcopy(blueprint).to_empty(device="cpu")
            for tensor in model.state_dict().values():
                tensor.zero_()
        return model

    def _initialized(self, size: str, seed: int) -> nn.Module:
        return self._drawn(self.blueprints[size].build, seed)

    def _drawn(self, build: Callable[[], nn.Module], seed: int) -> nn.Module:
        with torch_seed(seed, "initial state"), allocating("model.sizes: a model with its weights"):
            return build()

    @property
    def parts_change(self) -> bool:
        """Whether a client's part changes from round to round."""
        return False

    @property
    def has_private(self) -> bool:
        """Whether clients keep tensors for themselves."""
        return any(self.private.values())

    def part(self, size: str, round_number: int = 0, client: int = 0) -> Part:
        """Return a client's part in a round, without its private tensors."""
        whole = self.whole_part(size, round_number, client)
        private = self.private[size]
        if not private:
            return whole
        return {name: piece for name, piece in whole.items() if name not in private}

    def whole_part(self, size: str, round_number: int = 0, client: int = 0) -> Part:
        """Return a client's part if nothing were private. By default it depends on the size."""
        return self._parts[size]

    def evaluated(self, size: str, round_number: int) -> Part:
        """Return the part of the global state that is evaluated as a size after a round."""
        return self.part(size)

    @cached_property
    def _parts(self) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        for size, blueprint in self.blueprints.items():
            names = blueprint.module.state_dict()
            parts[size] = {name: Piece(self._placed(size, name)) for name in names}
        return parts

    def _placed(self, size: str, name: str) -> str:
        """Return the global name of a tensor of a size, also if it is a per-size statistic."""
        per_size = self.settings.normalization_statistics == "per-size"
        if per_size and name.endswith(STATISTICS):
            return f"{size}/{name}"
        return self._global_name(size, name)

    def _global_name(self, size: str, name: str) -> str:
        """Return `global_name`, which may be a user's own, after a check of its type."""
        global_name: object = self.global_name(size, name)
        if not isinstance(global_name, str):
            raise MotleyError(
                f"global_name of {type(self).__name__} returned {describe(global_name)} for "
                f"{name!r} of {size!r}; the tensor's global name is expected, as text."
            )
        return global_name

    def initial(self, seed: int) -> State:
        """Return the global state before the first round.

        It is the largest size's model, plus the tensors that only smaller sizes have.
        """
        state: State = {}
        for size in self._largest_first:
            tensors = self._initialized(size, seed).state_dict()
            for name, piece in self.part(size).items():
                state.setdefault(piece.name, tensors[name].clone())
        return state

    @cached_property
    def meta_state(self) -> State:
        """All tensors of the global state, on torch's meta device: names, shapes and dtypes."""
        state: State = {}
        for size in reversed(self._largest_first):
            for name, tensor in self.blueprints[size].module.state_dict().items():
                if name not in self.private[size]:
                    state[self._placed(size, name)] = tensor
        return state

    def initial_private(self, size: str, seed: int) -> State:
        """Return the private tensors that a client of a size starts with.

        They are those of the size's own initial model, so that a client can compute them from the
        seed, and neither the server nor a message ever has them.
        """
        if not self.private[size]:
            return {}
        tensors = self._initialized(size, seed).state_dict()
        return {name: tensors[name].clone() for name in tensors if name in self.private[size]}

    def zeros(self) -> State:
        """Return zeros for all global parameters, as control variates and dual variables start."""
        zeros = {}
        for name, tensor in self.meta_state.items():
            if name in self.parameters:
                zeros[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return zeros

    def parameters_of(self, size: str) -> frozenset[str]:
        """Return the names of the parameters in a size's part; its other tensors are buffers."""
        return self._parameters_by_size[size]

    @cached_property
    def _parameters_by_size(self) -> dict[str, frozenset[str]]:
        """`parameters_of` every size. It is asked once per update, and a module is slow to walk."""
        by_size = {}
        for size in self.sizes:
            names = frozenset(name for name, _ in self.blueprints[size].module.named_parameters())
            by_size[size] = names - self.private[size]
        return by_size

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The global names of parameters. All others are buffers, which no method corrects."""
        parameters: set[str] = set()
        for size in self.sizes:
            parameters.update(self._placed(size, name) for name in self.parameters_of(size))
        return frozenset(parameters)

    @cached_property
    def tied(self) -> dict[str, str]:
        """The second name of a tensor that a model has under two names -> its first name.

        Both are global names. The first one is the parameter's; a second name counts as a buffer.
        """
        tied: dict[str, str] = {}
        for size, blueprint in self.blueprints.items():
            for second, first in second_names(blueprint.module).items():
                if second not in self.private[size]:
                    tied[self._placed(size, second)] = self._placed(size, first)
        return tied

    def _check_tied(self) -> None:
        """Refuse tied tensors that could not stay equal."""
        for size, blueprint in self.blueprints.items():
            private = self.private[size]
            for second, first in second_names(blueprint.module).items():
                prefix = f"model.sizes: {first!r} and {second!r} of {size!r} are one tensor, and"
                if (first in private) != (second in private):
                    raise MotleyError(
                        f"{prefix} only one of the names is private (split.private = "
                        f"{list(self.settings.private)}). Name both or none."
                    )
                if first in private:
                    continue
                place = self._placed(size, second)
                if place in self.parameters or self.tied[place] != self._placed(size, first):
                    raise MotleyError(
                        f"{prefix} two in another size. Use split.name = 'grouped', which shares "
                        "nothing between sizes."
                    )

    @cached_property
    def cross_layers(self) -> tuple[CrossLayer, ...]:
        """The pairs that InCo's authors mix, under their global names."""
        return self._placed_pairs(lambda blueprint: blueprint.cross_layers)

    @cached_property
    def same_shape_layers(self) -> tuple[CrossLayer, ...]:
        """The pairs of all layers of one shape in a stage, under their global names."""
        shapes = {name: tensor.shape for name, tensor in self.meta_state.items()}
        pairs = self._placed_pairs(lambda blueprint: same_shape_layers(blueprint.module))
        # Layers of a narrow size may have one shape although the whole layers have not.
        return tuple(pair for pair in pairs if shapes[pair.source] == shapes[pair.target])

    def _placed_pairs(
        self, pairs_of: Callable[[Blueprint], Sequence[CrossLayer]]
    ) -> tuple[CrossLayer, ...]:
        pairs: dict[CrossLayer, None] = {}  # used as an ordered set
        for size in self._largest_first:
            for pair in pairs_of(self.blueprints[size]):
                if self.private[size] & {pair.source, pair.target}:
                    continue
                source, target = self._placed(size, pair.source), self._placed(size, pair.target)
                pairs[CrossLayer(source, target, pair.chunks)] = None
        return tuple(pairs)

    @property
    def smallest_first(self) -> tuple[str, ...]:
        """The sizes, the one with the fewest parameters first."""
        return tuple(reversed(self._largest_first))

    @cached_property
    def _largest_first(self) -> tuple[str, ...]:
        def weight(size: str) -> int:
            return sum(parameter.numel() for parameter in self.blueprints[size].module.parameters())

        return tuple(sorted(self.sizes, key=weight, reverse=True))


def is_own_model(model: nn.Module) -> bool:
    """Tell whether a model is one of Motley's own, without modules of a user in it."""
    if not type(model).__module__.startswith(OWN_MODELS):
        return False
    packages = (OWN_MODELS, "torch.nn.")
    return all(type(module).__module__.startswith(packages) for module in model.modules())


def is_described_by_its_state(blueprint: nn.Module) -> bool:
    """Tell whether a model's state contains all of its tensors, so that a copy needs nothing else.

    Copying such a blueprint takes milliseconds, while initializing the weights of a ResNet takes a
    quarter of a second. Users' models are never copied: they may keep tensors anywhere.
    """
    if not is_own_model(blueprint):
        return False
    return all(name in blueprint.state_dict() for name, _ in blueprint.named_buffers())


def _without_statistics(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose batch norms keep no statistics and always normalize with their batch."""
    model = build()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return model


def _accept(item: Any) -> type[Split]:
    """Check a user's own split."""
    split: type[Split] = subclass_of(Split, "motley.Split")(item)
    if not issubclass(split.Settings, SplitSettings):
        raise MotleyError(
            f"its Settings are {describe(split.Settings)}; a subclass of motley.SplitSettings is "
            "expected."
        )
    check_arguments(split.global_name, ("self", "size", "name"), f"{split.__name__}.global_name")
    return split


SPLITS: Registry[type[Split]] = Registry("split", group="motley.splits", accept=_accept)
