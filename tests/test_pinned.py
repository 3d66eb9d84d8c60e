"""Short federations of every kind end where they ended when their results were recorded.

A refactoring keeps these results. A commit that changes one of them on purpose records them again,

    python -m tests.test_pinned

and says which ones changed, and why. Bits depend on torch's version and on the processor, whose maker and model decide
which code of MKL and oneDNN runs. The file may have recordings of several processors; `--add` adds that of this machine to
them, and must not be used to accept a change. On a machine of which there is no recording, only the length of the way that
the weights went and the losses are compared, loosely.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from motley.config import Config
from motley.engine import DebugEngine, LocalEngine
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.run import resume_run, start_run
from motley.server.state import ServerState
from tests.conftest import chosen, tiny_config

RECORDED = Path(__file__).with_name("pinned.json")
#: Relative difference that another CPU or another version of torch may make in so few steps.
LOOSE = 0.02

MLPS = ("model.sizes=['mlp1','mlp2','mlp3']",)
VITS = (
    "model.sizes=['vit1','vit2','vit3']",
    "model.vit.dim=16",
    "model.vit.heads=2",
    "model.vit.patch=4",
)
WIDTHS = ("split.rates=[1,0.5,0.25]", "model.sizes=['resnet14']")
EXITS = ("split.cuts=[2,3,6]", "split.rates=[0.5,0.75,1]", "model.sizes=['resnet14']")
SGD = ("training.optimizer={name='sgd', lr=0.05, momentum=0.9, weight_decay=5e-4}",)

CASES: dict[str, tuple[str, ...]] = {
    # Methods, each with a split that it is made for.
    "fedavg": ("method.name=fedavg",),
    "fedprox": ("method.name=fedprox",),
    "fedprox-norms": ("method.name=fedprox", "method.proximal=norms"),
    "scaffold": ("method.name=scaffold", *SGD),
    "fednova": ("method.name=fednova", *SGD),
    "fednova-prox": ("method.name=fednova", "method.mu=0.1", "training.epochs=0.5"),
    "moon": ("method.name=moon", "model.projection=8"),
    "feddyn": ("method.name=feddyn",),
    "fedspeed": ("method.name=fedspeed", *SGD),
    "fedin": ("method.name=fedin",),
    "fedin-exact": (
        "method.name=fedin",
        "method.combine=exact",
        "method.samples=2",
        "method.noise=0.5",
    ),
    "fedimpro-official": (
        "method.name=fedimpro",
        "method.variant=official",
        "method.ramp=2",
        "method.noise=0.01",
    ),
    "fedimpro-scaffold": ("method.name=fedimpro-scaffold",),
    "HeteroFL": ("method.name=HeteroFL", *WIDTHS),
    "FedRolex": ("method.name=FedRolex", *WIDTHS, "split.normalization_statistics=batch"),
    "FederatedDropout": ("method.name=FederatedDropout", *WIDTHS),
    "FjORD": ("method.name=FjORD", *WIDTHS),
    "ScaleFL": (
        "method.name=ScaleFL",
        *EXITS,
        "split.normalization_statistics=batch",
        "method.begin=0",
    ),
    "DepthFL": ("method.name=DepthFL", *EXITS, "method.ramp=2"),
    "InclusiveFL": ("method.name=InclusiveFL",),
    "fedgen": chosen("fedgen"),
    "ccvr": chosen("ccvr"),
    "spherefed": chosen("spherefed"),
    # Methods that distill at the server, and methods whose clients have models of their own.
    "feddf": chosen("feddf"),
    "fedet": chosen("fedet"),
    "fedproto": chosen("fedproto"),
    "fd": chosen("fd"),
    "fedmd": chosen("fedmd"),
    "local": chosen("local"),
    "fedrep": (*chosen("fedrep"), "split.private=['head']", "server.ema_decay=0"),
    "ditto": chosen("ditto"),
    "fedbn": ("split.private=['normalization']", "server.ema_decay=0"),
    # InCo, its ablations, and methods on top of which it runs.
    "InCoAvg": ("method.name=InCoAvg",),
    "InCoAvg-paper": ("method.name=InCoAvg", "server.inco.variant=paper"),
    "InCoAvg-without-N": ("method.name=InCoAvg w/o N",),
    "InCoAvg-without-O": ("method.name=InCoAvg w/o O",),
    "InCoScaffold": ("method.name=InCoScaffold",),
    "InCoDyn-vit": ("method.name=feddyn", "server.inco.variant=official", *VITS),
    # Splits and families.
    "grouped": ("split.name=grouped",),
    "homogeneous-cnn": ("model.sizes=['cnn']", "split.name=homogeneous"),
    "shared-statistics": ("split.normalization_statistics=shared",),
    "batch-statistics": ("split.normalization_statistics=batch",),
    "vit": VITS,
    "vgg": ("model.sizes=['vgg9']", "split.name=homogeneous", "data.transform.resize=16"),
    "preact-width": (
        "model.sizes=['heterofl-resnet18']",
        "split.name=width",
        "split.rates=[0.125,0.0625]",
    ),
    # The server.
    "fedavgm": ("server.optimizer.name=momentum", "server.optimizer.nesterov=true"),
    "fedadam": ("server.optimizer.name=adam",),
    "fedyogi-inco": ("server.optimizer.name=yogi", "server.inco.variant=official"),
    "fedadagrad": ("server.optimizer.name=adagrad",),
    "ema": ("server.ema_decay=0.9", "server.lr=0.5"),
    "weighted-by-samples": ("server.weighting=samples", "data.partition.name=quantity"),
    # The way up, and privacy.
    "upload-fp16": ("uplink.dtype=fp16",),
    "upload-bf16-scaffold": ("uplink.dtype=bf16", "method.name=scaffold"),
    "noise-in-transit": ("uplink.noise=0.5",),
    "privacy": (*MLPS, "privacy.clip=0.5", "privacy.noise=0.5"),
    # Clients, data and steps.
    "dynamic-sizes": ("federation.size_assignment=dynamic",),
    "alternating-sizes": (
        "federation.size_assignment=alternate",
        "federation.size_fractions=[2,1,1]",
    ),
    "fedml-sampling": ("federation.sampler=fedml",),
    "shards": ("data.partition.name=shards",),
    "augmented": (
        "data.transform.crop_padding=1",
        "data.transform.flip=true",
        "data.transform.cutout=2",
    ),
    "clipped-and-dropped": (
        "training.max_grad_norm=1",
        "training.drop_last=true",
        "training.epochs=1.5",
        *SGD,
    ),
    "stacked": (*MLPS, "engine.vmap_clients=4"),
    "debug": ("engine.name=debug", "method.name=InCoProx"),
    "three-clients": ("federation.clients=3", "federation.clients_per_round=3"),
    # Recalibrated statistics.
    "recalibrated": ("server.statistics.name=recalibrate", "server.ema_decay=0"),
    "recalibrated-ema": (
        "server.statistics.name=recalibrate",
        "server.ema_decay=0.9",
        "split.normalization_statistics=shared",
    ),
}
BRIEF = (
    "training.rounds=2",
    "training.batch_size=16",
    "training.steps=3",
    "run.tensorboard=false",
    "evaluation.every=2",
)


def config_of(case: str) -> Config:
    """Return the configuration of a case."""
    own = CASES[case]
    brief = [
        line
        for line in BRIEF
        if not (line.startswith("training.steps") and "epochs" in " ".join(own))
    ]
    return tiny_config(*brief, *own)


def played(case: str) -> dict[str, Any]:
    """Play a case and return what is recorded of it."""
    federation = Federation(config_of(case))
    start = server = federation.initial_state()
    for _ in range(federation.config.training.rounds):
        server, record = federation.run_round(server)
        assert not record.refused
    accuracies = [score.accuracy for score in record.scores.values()]
    return {
        "hash": hash_of(server),
        "clients": hash_of_clients(federation, server),
        "way": way(start.state, server.state),
        "train_loss": None if math.isnan(record.train_loss) else record.train_loss,
        "test_loss": sum(score.loss for score in record.scores.values()) / len(accuracies),
    }


def hash_of(server: ServerState) -> str:
    """Return a hash of everything that a server holds."""
    sections = {"state": server.state, "averaged": server.ema or {}, "method": server.method_state}
    sections["optimizer"] = server.stage_states.get("optimizer", {})
    whole = {
        f"{section}/{name}": t for section, state in sections.items() for name, t in state.items()
    }
    return fingerprint(whole)[:16]


def hash_of_clients(federation: Federation, server: ServerState) -> str:
    """Return a hash of the stored states of all clients; empty if they keep none."""
    assert isinstance(federation.engine, LocalEngine | DebugEngine)
    clients = federation.engine.clients
    whole = {}
    for client, number in server.client_state_rounds.items():
        if not clients.states.are_kept(federation.size_of(client, number)):
            continue
        for name, tensor in clients.states.store.get(client, number).items():
            whole[f"{client}/{name}"] = tensor
    return fingerprint(whole)[:16] if whole else ""


def way(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> float:
    """Return how far the floating values of a state went."""
    squares = [
        float((end[n].double() - t.double()).square().sum())
        for n, t in start.items()
        if t.is_floating_point()
    ]
    return math.sqrt(sum(squares))


def machine() -> dict[str, str]:
    """Return what the last bits depend on."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": instructions, "processor": processor()}


def processor() -> str:
    """Return the maker and the model of the processor, or "" if the system does not say."""
    lines: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            lines[name.strip()] = value.strip()
    except OSError:
        pass
    return " ".join(lines.get(name, "") for name in ("vendor_id", "cpu family", "model")).strip()


def is_of(recording: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Tell whether a recording was made on a machine like this one. A recorded processor may be a maker alone."""
    same = all(recording[name] == here[name] for name in ("torch", "cpu"))
    return same and here["processor"].startswith(recording["processor"])


@dataclass(frozen=True)
class Recorded:
    """The recorded cases, and whether this machine must end with the same bits."""

    cases: dict[str, dict[str, Any]]
    exact: bool


def read_recorded() -> Recorded:
    """Return the recording of a machine like this one, or another one to compare with loosely."""
    recordings = json.loads(RECORDED.read_text(encoding="utf-8"))
    for recording in recordings:
        if is_of(recording["machine"], machine()):
            return Recorded(recording["cases"], exact=True)
    return Recorded(recordings[0]["cases"], exact=False)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return read_recorded()


@pytest.mark.parametrize("case", CASES)
def test_a_federation_ends_where_it_ended(case: str, recorded: Recorded) -> None:
    found, expected = played(case), recorded.cases[case]
    if recorded.exact:
        assert found["hash"] == expected["hash"]
        assert found["clients"] == expected["clients"]
    for name in ("way", "train_loss", "test_loss"):
        if expected[name] is None:  # with differential privacy, clients do not report their loss
            assert found[name] is None
        else:
            assert found[name] == pytest.approx(expected[name], rel=LOOSE)


@pytest.mark.parametrize("case", ["scaffold", "fedyogi-inco", "ema"])
def test_resumed_halves_end_there_too(case: str, recorded: Recorded, tmp_path: Path) -> None:
    config = config_of(case)
    half = config.model_copy(update={"training": config.training.model_copy(update={"rounds": 1})})
    start_run(half, tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    _, server = resume_run(tmp_path / "run")
    if recorded.exact:
        assert hash_of(server) == recorded.cases[case]["hash"]
    assert server.round_number == 2


def test_every_case_is_recorded() -> None:
    for recording in json.loads(RECORDED.read_text(encoding="utf-8")):
        assert list(recording["cases"]) == list(CASES)


def main(add: bool) -> None:
    """Record the results of all cases anew, and say which ones changed.

    `add`: keep the recordings of other machines. Without it they are dropped, because they would be out of date.
    """
    recordings = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else []
    of_this = [one for one in recordings if is_of(one["machine"], machine())]
    others = [one for one in recordings if one not in of_this]
    before = of_this[0]["cases"] if of_this else {}
    cases = {}
    for case in CASES:
        cases[case] = played(case)
        for part in ("hash", "clients"):
            if case in before and cases[case][part] != before[case].get(part):
                print(f"changed: {case} ({part})")
    recordings = [*(others if add else []), {"machine": machine(), "cases": cases}]
    RECORDED.write_text(json.dumps(recordings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main("--add" in sys.argv[1:])
