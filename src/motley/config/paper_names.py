"""The papers' names for methods: InCoProx is FedProx over layers that sizes share, with InCo.

Such a name stands for plain settings: a method with a split, with or without InCo, or with a server
optimizer. It is accepted wherever a method is named, and a run saves the plain settings. The
settings win over lower layers of the configuration, and are rejected beside other values of the
same keys in the same layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motley.core.dotted import is_dotted
from motley.core.errors import MotleyError, unknown
from motley.methods import METHODS
from motley.splits import SPLITS

Table = Mapping[str, Any]

PREFIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "Fed": (
        "nothing shared between sizes: the baselines of InCo's preprint",
        {"split.name": "grouped", "server.inco.variant": "off"},
    ),
    "Hetero": (
        "layer by layer over all sizes: the baselines of the InCo paper",
        {"split.name": "depth", "server.inco.variant": "off"},
    ),
    "InCo": (
        'layer by layer, with InCo; server.inco.variant = "paper" may be set beside it',
        {
            "split.name": "depth",
            "server.inco.variant": "official",
            "server.inco.normalize": True,
            "server.inco.optimize": True,
        },
    ),
}
#: InCo's own ablations: a name that begins with InCo, a space, and one of these.
ABLATIONS: dict[str, dict[str, Any]] = {
    "w/o N": {"server.inco.normalize": False},
    "w/o O": {"server.inco.optimize": False},
    "w/o N & O": {"server.inco.normalize": False, "server.inco.optimize": False},
}
STEMS: dict[str, dict[str, Any]] = {
    "Avg": {"method.name": "fedavg"},
    "Prox": {"method.name": "fedprox"},
    "Scaffold": {"method.name": "scaffold"},
    "Nova": {"method.name": "fednova"},
    "Moon": {"method.name": "moon"},
    "Dyn": {"method.name": "feddyn"},
    "Speed": {"method.name": "fedspeed"},
    "SAM": {"method.name": "fedsam"},
    "AvgM": {"method.name": "fedavg", "server.optimizer.name": "momentum"},
    "Adam": {"method.name": "fedavg", "server.optimizer.name": "adam"},
    "Yogi": {"method.name": "fedavg", "server.optimizer.name": "yogi"},
    "Adagrad": {"method.name": "fedavg", "server.optimizer.name": "adagrad"},
}
#: A method with its split. InCo is off, unless the layer that names the system turns it on.
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "HeteroFL": (
        "leading channels by rate",
        {
            "method.name": "heterofl",
            "split.name": "width",
            "split.channels": "leading",
            "split.scaler": True,
        },
    ),
    "FedRolex": (
        "a rolling window of channels; evaluated with the statistics of test batches",
        {
            "method.name": "heterofl",
            "method.statistics": "running",
            "split.name": "width",
            "split.channels": "rolling",
            "split.scaler": True,
            "split.normalization_statistics": "batch",
        },
    ),
    "FederatedDropout": (
        "random channels for each client and round (Caldas et al., 2018)",
        {"method.name": "fedavg", "split.name": "width", "split.channels": "random"},
    ),
    "FjORD": (
        "leading channels; a client trains every width up to its own",
        {"method.name": "fjord", "split.name": "ordered"},
    ),
    "ScaleFL": (
        "depth and width together, with early exits; evaluated with the statistics of test batches",
        {
            "method.name": "scalefl",
            "split.name": "grid",
            "split.scaler": True,
            "split.normalization_statistics": "batch",
        },
    ),
    "DepthFL": (
        "depth with early exits that teach each other, over FedDyn",
        {"method.name": "depthfl", "split.name": "grid", "split.output": "mean"},
    ),
    "InclusiveFL": (
        "depth, with last blocks that learn from the next larger size",
        {"method.name": "inclusivefl", "split.name": "inclusive"},
    ),
}

_FEDIN = {
    "method.name": "fedin",
    "split.name": "depth",
    "server.inco.variant": "off",
    "method.mu": 0.1,
    "method.samples": 1,
    "method.combine": "simplified",
    "method.noise": 0.0,
}
#: Methods without a global model, of which the quickstart would keep a moving average.
_OWN_MODELS = {"split.name": "grouped", "server.inco.variant": "off", "server.ema_decay": 0.0}
#: Names of single methods and their variants, by the papers that have them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedIN": ("layer by layer over all sizes, as in the FedIN paper", _FEDIN),
    "FedIN (+Noise)": ("its version with noise on features", {**_FEDIN, "method.noise": 0.8}),
    "FedIN w/o IN": ("its ablation without features", {**_FEDIN, "method.samples": 0}),
    "FedIN w/o Prox": ("its ablation without the proximal term", {**_FEDIN, "method.mu": 0.0}),
    "FedImpro": (
        "over whatever split is set",
        {"method.name": "fedimpro", "server.inco.variant": "off"},
    ),
    "FedIN w/o Opt": (
        "its ablation that adds both gradients up",
        {**_FEDIN, "method.combine": "sum"},
    ),
    "FedProto": ("models of clients' own", {"method.name": "fedproto", **_OWN_MODELS}),
    "FD": ("models of clients' own", {"method.name": "fd", **_OWN_MODELS}),
    "FedMD": ("models of clients' own", {"method.name": "fedmd", **_OWN_MODELS}),
    "Local": (
        "models of clients' own, without any exchange",
        {"method.name": "local", **_OWN_MODELS},
    ),
    "FedPer": (
        "FedAvg with private heads, over whatever split is set",
        {"method.name": "fedavg", "split.private": "head", "server.inco.variant": "off"},
    ),
    "LG-FedAvg": (
        "FedAvg of heads with private bodies, over whatever split is set",
        {"method.name": "fedavg", "split.private": "body", "server.inco.variant": "off"},
    ),
    "FedBN": (
        "FedAvg with private normalization layers, over whatever split is set",
        {"method.name": "fedavg", "split.private": "normalization", "server.inco.variant": "off"},
    ),
    "FedRep": (
        "private heads, trained before the body, over whatever split is set",
        {"method.name": "fedrep", "split.private": "head", "server.inco.variant": "off"},
    ),
    "Ditto": (
        "a personal model beside the global one, over whatever split is set",
        {"method.name": "ditto", "server.inco.variant": "off"},
    ),
    "FedLC": (
        "over whatever split is set",
        {"method.name": "fedlc", "server.inco.variant": "off"},
    ),
    "CCVR": (
        "after FedAvg, over whatever split is set",
        {"method.name": "ccvr", "server.inco.variant": "off"},
    ),
    "SphereFed": (
        "over whatever split is set",
        {"method.name": "spherefed", "server.inco.variant": "off"},
    ),
    "FedGen": (
        "layer by layer over all sizes, as in the FedIN paper",
        {"method.name": "fedgen", "split.name": "depth", "server.inco.variant": "off"},
    ),
    "FedDF": (
        "per architecture, then distilled on [public] images",
        {"method.name": "feddf", "split.name": "grouped", "server.inco.variant": "off"},
    ),
    "FedET": (
        "per architecture; the ensemble trains the largest size on [public] images",
        {"method.name": "fedet", "split.name": "grouped", "server.inco.variant": "off"},
    ),
}


def _all_names() -> dict[str, dict[str, Any]]:
    """Return every name with the settings that it stands for."""
    names: dict[str, dict[str, Any]] = {}
    for name, (_, settings) in (*VARIANTS.items(), *SYSTEMS.items()):
        names[name] = settings
    for prefix, (_, sharing) in PREFIXES.items():
        for stem, method in STEMS.items():
            names[prefix + stem] = {**sharing, **method}
    _, inco = PREFIXES["InCo"]
    for stem, method in STEMS.items():
        for ablation, without in ABLATIONS.items():
            names[f"InCo{stem} {ablation}"] = {**inco, **without, **method}
    return names


#: Name -> the settings it stands for.
NAMES = _all_names()


def spelled_out(values: Table, below: Table) -> Table:
    """Replace a paper's name of a method in a layer by the settings that it stands for.

    `below` has the values of all lower layers.
    """
    name = _get(values, "method.name")
    if not isinstance(name, str) or is_dotted(name) or name in METHODS.names() or name in METHODS:
        return values  # a plug-in that cannot be imported is reported by the table's validation
    if name not in NAMES:
        raise MotleyError("method.name: " + unknown("method", name, METHODS.names(), also=NAMES))
    meaning = dict(NAMES[name])
    has_inco = meaning.get("server.inco.variant", "off") != "off"
    variant_below = _get(below, "server.inco.variant")
    if has_inco and variant_below not in (None, "off"):
        # The name says that InCo is on; a lower layer may say which variant of it.
        meaning["server.inco.variant"] = variant_below
    values = _with(values, "method.name", meaning.pop("method.name"))
    if name in SYSTEMS and _get(values, "server.inco") is None:
        # InCo in a lower layer, such as a preset, is not part of the named paper's method.
        values = _with(values, "server.inco.variant", "off")
    for key, value in meaning.items():
        given = _get(values, key)
        if given is None:
            values = _with(values, key, value)
        elif not _agree(key, given, value):
            raise MotleyError(
                f"{key} = {given!r}: method.name = {name!r} stands for {key} = {value!r}. "
                f"Leave {key} out, or set method.name = {NAMES[name]['method.name']!r}, which "
                "leaves it free."
            )
    return values


def _agree(key: str, given: Any, meant: Any) -> bool:
    if key == "split.name":
        # An unknown split is rejected later, with the allowed names.
        return given not in SPLITS or SPLITS.entry(given).name == meant
    if key == "server.inco.variant":
        return (given == "off") == (meant == "off")
    return bool(given == meant)


def _get(values: Any, key: str) -> Any:
    for step in key.split("."):
        values = values.get(step) if isinstance(values, Mapping) else None
    return values


def _with(values: Any, key: str, value: Any) -> Table:
    """Return a table with one more key.

    A value where a table should be stays as it is, and is rejected later.
    """
    step, _, rest = key.partition(".")
    if not isinstance(values, Mapping):
        return values
    return {**values, step: _with(values.get(step, {}), rest, value) if rest else value}
