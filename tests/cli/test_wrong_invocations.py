"""Wrong invocations exit with status 2 and a message that says what is wrong, and write nothing.

The working folder contains R (a finished run of three rounds), adir (an empty folder), afile,
bad.toml (not TOML), binary.toml (not text), ok.toml (a configuration) and list.json (not timings).
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command, TinyRun

#: An invocation, and a part of its message.
WRONG = [
    # --- commands, options and arguments
    ("rnu", "No such command 'rnu'. Did you mean 'run'?"),
    ("deploy nod", "No such command 'nod'. Did you mean 'node'?"),
    ("--nope", "No such option"),
    ("run --rounds 3", "No such option"),
    ("run ok.toml other.toml", "Got unexpected extra argument (other.toml)"),
    ("run --set", "Option '--set' requires an argument."),
    ("run --preset ''", "--preset '': is empty. Give a value, or leave the option out."),
    ("study demo --plan --score ''", "--score '': is empty."),
    ("deploy init fed --host ''", "--host '': is empty."),
    ("resume", "Missing argument 'RUN'."),
    ("resume R R", "Got unexpected extra argument (R)"),
    ("resume R --rounds 0", "0 is not in the range x>=1."),
    ("resume R --rounds many", "'many' is not a valid integer"),
    ("show", "Missing argument 'RUN...'."),
    ("show R --nope", "No such option"),
    ("show R --fingerprint --json", "--fingerprint and --json: give one of them"),
    ("list", "Missing argument 'KIND'"),
    ("list methodz", "'methodz' is not one of 'methods', 'models', 'datasets'"),
    ("list methods x", "motley list methods: takes no second argument; 'x' was given."),
    ("list methods --markdown", "--markdown: is for `motley list settings`"),
    ("list settings zzz", "motley list settings: no key contains 'zzz'."),
    ("bench --rounds 0", "0 is not in the range x>=1."),
    ("bench --compare list.json", "give two files: --compare OLD --compare NEW"),
    ("report", "Missing argument 'RUN-or-STUDY...'."),
    ("analyze", "Missing argument 'NAME'."),
    ("analyze sizes", "Missing argument 'RUN...'."),
    ("analyze size R", "unknown analysis 'size'. Did you mean 'sizes'?"),
    ("watch", "Missing argument 'RUN-or-STUDY'."),
    ("watch R --port 99999", "99999 is not in the range 0<=x<=65535."),
    ("study inco-table2 --seeds -1", "-1 is not in the range x>=0."),
    ("deploy init", "Missing argument 'DIR'."),
    # --- input files
    ("run none.toml", "none.toml: there is no such configuration file."),
    ("run bad.toml", "bad.toml: is not valid TOML: "),
    ("run binary.toml", "binary.toml: cannot be read: "),
    ("run adir", "adir: cannot be read: "),
    ("plan none.toml", "none.toml: there is no such configuration file."),
    ("study none.toml", "none.toml: there is no such configuration file."),
    ("study bad.toml", "bad.toml: is not valid TOML: "),
    ("study none", "unknown study 'none'."),
    ("resume none", "none is not a run: there is no config.toml in it."),
    ("resume afile", "afile is not a run: there is no config.toml in it."),
    ("show none", "none is not a run: there is no config.toml in it."),
    ("show R none", "none is not a run: there is no config.toml in it."),
    ("list runs none", "none: there is no such folder."),
    ("list runs afile", "afile: there is no such folder."),
    ("report none", "none is neither a run (config.toml) nor a study (study.json)."),
    ("report adir", "adir is neither a run (config.toml) nor a study (study.json)."),
    ("watch none", "none is neither a run (config.toml) nor a study (study.json)."),
    ("analyze sizes none", "none is not a run: there is no config.toml in it."),
    ("bench --compare list.json --compare list.json", "list.json is not a file of timings: "),
    ("bench --compare none --compare list.json", "none is not a file of timings: "),
    ("deploy server none", "none"),
    ("deploy run none", "none"),
    ("run --set model.weights=none", "none': cannot be read: "),
    ("run --set model.weights=adir", "adir': cannot be read: "),
    ("run --set model.weights=afile", "afile': is not a safetensors file: "),
    ("run --set data.name=npz", "needs a path"),
    ("run --set data.name=npz --set data.path=none.npz", "none.npz"),
    ("run --set data.name=npz --set data.path=afile", "afile"),
    ("run --set data.name=cifar10", "data set 'cifar10' was not found."),
    ("run --set data.partition.name=file --set data.partition.path=none.json", "none.json"),
    (
        "run --set data.partition.name=file --set data.partition.path=afile",
        "must end in .json or .npz.",
    ),
    # --- outputs
    ("run --out afile", "afile already exists and is a file; a run needs a folder of its own."),
    ("run --out afile/x", "afile/x: cannot be created: afile is a file."),
    (
        "run --out R",
        "R already exists and is not empty; a run needs a folder of its own. To continue it:",
    ),
    ("resume R --rounds 2", "--rounds 2: R has already completed 3 rounds."),
    ("bench --json nodir/b.json", "nodir/b.json: cannot be written: there is no folder "),
    ("bench --json adir", "adir: is a folder; give the name of a file."),
    ("report R -o adir", "adir: is a folder; give the name of a file."),
    ("report R -o nodir/x.html", "nodir/x.html: cannot be written: there is no folder "),
    ("report R -o afile/x.html", "afile/x.html: cannot be written: "),
    ("report R -o /proc/x.html", "/proc/x.html: cannot be written: "),
    ("analyze sizes R -o afile", "afile: is a file; give the name of a folder."),
    ("analyze sizes R -o /proc/x", "/proc/x: cannot be written: "),
    ("study inco-table2 --data digits --out afile", "afile: is a file; give the name of a folder."),
    ("study inco-table2 --data digits --out /proc/x", "/proc/x: cannot be written: "),
    ("deploy init afile", "afile is a file; a deployment needs a folder of its own."),
    ("deploy init R", "R already exists and is not empty; a deployment needs a folder of its own."),
    ("deploy init /proc/x", "/proc/x: "),
    # --- how settings are written
    (
        "run --set rounds",
        "--set 'rounds': write it as table.key=value, for example training.rounds=20.",
    ),
    ("run --set =3", "--set '=3': write it as table.key=value"),
    ("run --set training.=3", "--set 'training.=3': write it as table.key=value"),
    ("run --set training..rounds=3", "--set 'training..rounds=3': write it as table.key=value"),
    (
        "run --set training.round=3",
        "training.round = 3: unknown key 'round'. Did you mean 'rounds'? Allowed: batch_size,",
    ),
    ("run --set trainnig.rounds=3", "trainnig: unknown key 'trainnig'. Did you mean 'training'?"),
    ("run --set training=5", "training = 5: is a table; set a key of it: rounds, epochs,"),
    ("run --set data.partition=iid", "data.partition = 'iid': is a table; set a key of it: name."),
    ("run --set seed.x=1", "seed: should be a valid integer."),
    ("run --preset quickstrat", "unknown preset 'quickstrat'. Did you mean 'quickstart'?"),
    # --- values of the wrong type or out of range
    ("run --set training.rounds=ten", "training.rounds = 'ten': should be a valid integer"),
    ("run --set training.rounds=1.5", "training.rounds = 1.5: should be a valid integer"),
    ("run --set training.rounds=0", "training.rounds = 0: should be greater than or equal to 1."),
    ("run --set training.rounds=true", "training.rounds = True: should be a number."),
    ("run --set training.rounds=", "training.rounds = '': should be a valid integer"),
    ("run --set training.epochs=-1", "training.epochs = -1: should be greater than 0."),
    (
        "run --set training.batch_size=0",
        "training.batch_size = 0: should be greater than or equal to 1.",
    ),
    (
        "run --set training.lr_milestones=0",
        "training.lr_milestones.0 = 0: should be greater than or equal to 1.",
    ),
    ("run --set training.optimizer.lr=0", "training.optimizer.lr = 0: should be greater than 0."),
    (
        "run --set training.optimizer.lr=nan",
        "training.optimizer.lr = nan: should be a finite number.",
    ),
    ("run --set training.optimizer.name=adan", "Did you mean 'adam'? Allowed: adam, adamw, sgd."),
    ("run --set seed=-1", "seed = -1: should be greater than or equal to 0."),
    ("run --set seed=abc", "seed = 'abc': should be a valid integer"),
    (
        "run --set data.transform.resize=-1",
        "data.transform.resize = -1: should be greater than or equal to 0.",
    ),
    ("run --set data.partition.alpha=0", "data.partition.alpha = 0: should be greater than 0."),
    ("run --set model.resnet.width=0", "model.resnet.width = 0: should be greater than 0."),
    (
        "run --set model.resnet.stem=big",
        "model.resnet.stem = 'big': should be 'imagenet' or 'cifar'.",
    ),
    ("run --set server.ema_decay=1", "server.ema_decay = 1: should be less than 1."),
    (
        "run --set server.min_fraction=2",
        "server.min_fraction = 2: should be less than or equal to 1.",
    ),
    ("run --set engine.threads=0", "engine.threads = 0: should be greater than or equal to 1."),
    (
        "run --set engine.threads=100000",
        "engine.threads = 100000: should be less than or equal to 1024.",
    ),
    (
        "run --set evaluation.targets=2",
        "evaluation.targets = 2: accuracy is a fraction; targets are at most 1.",
    ),
    ("run --set evaluation.every=0", "evaluation.every = 0: should be greater than or equal to 1."),
    (
        "run --set run.keep_checkpoints=0",
        "run.keep_checkpoints = 0: should be greater than or equal to 1.",
    ),
    (
        "run --set method.name=InCoAvg --set server.inco.theta_max=0",
        'server.inco.theta_max = 0: should be a number above 0, or "off".',
    ),
    (
        "run --set method.name=fedprox --set method.mu=-1",
        "method.mu = -1: should be greater than or equal to 0.",
    ),
    (
        "run --set split.name=width --set split.rates=2",
        "split.rates.0 = 2: should be less than or equal to 1.",
    ),
    ("deploy init f --port 0", "port = 0: should be greater than or equal to 1."),
    # --- unknown names
    (
        "run --set data.name=cifar-10",
        "data.name: unknown data set 'cifar-10'. Did you mean 'cifar10'?",
    ),
    ("run --set data.transform.variant=incoo", "unknown transform 'incoo'. Did you mean 'inco'?"),
    (
        "run --set data.partition.name=dirichlett",
        "unknown partition 'dirichlett'. Did you mean 'dirichlet'?",
    ),
    (
        "run --set method.name=fedavgg",
        "method.name: unknown method 'fedavgg'. Did you mean 'fedavg'?",
    ),
    (
        "run --set method.mu=1",
        "method.mu = 1: has no effect with method.name = 'fedavg'; it is for 'fedprox'",
    ),
    ("run --set server.inco.variant=best", "should be 'off', 'paper' or 'official'."),
    ("run --set split.name=dept", "split.name: unknown split 'dept'. Did you mean 'depth'?"),
    (
        "run --set split.rates=1",
        "has no effect with split.name = 'depth'; it is for 'width', 'grid' and 'ordered'.",
    ),
    (
        "run --set model.sizes=[resnet11]",
        "model.sizes = ['resnet11']: unknown model 'resnet11'. Did you mean 'resnet1",
    ),
    (
        "run --set server.optimizer.name=adamw",
        "Did you mean 'adam'? Allowed: adagrad, adam, momentum, none, yogi.",
    ),
    ("run --set uplink.dtype=int8", "uplink.dtype = 'int8': should be 'fp32', 'fp16' or 'bf16'."),
    ("run --set engine.name=turbo", "engine.name = 'turbo': should be 'local', 'debug', 'flower'"),
    ("run --engine turbo", "engine.name = 'turbo': should be 'local', 'debug', 'flower'"),
    ("run --set engine.device=tpu", "engine.device = 'tpu': allowed are auto, cpu, cuda"),
    (
        "run --set federation.size_assignment=budgets",
        "federation.size_assignment = 'budgets': should be 'blocks', 'alternate'",
    ),
    ("study inco-table2 --scale huge", "unknown scale 'huge'. Allowed: full, half, quick."),
    (
        "study inco-table2 --data mnist",
        "--data mnist: unknown name 'mnist'. Did you mean 'fashion-mnist'?",
    ),
    ("study inco-table2 --method x", "--method x: unknown name 'x'."),
    # --- settings that do not fit together
    ("run --set model.sizes=[]", "model.sizes = []: at least one size is needed."),
    ("run --set model.sizes=resnet10,resnet10", "a size is named twice."),
    ("run --set model.sizes=7", "model.sizes = 7: should be a list."),
    ("run --set split.name=homogeneous", "split.name = 'homogeneous' takes exactly one size."),
    (
        "run --set federation.clients=0",
        "federation.clients = 0: should be greater than or equal to 1.",
    ),
    (
        "run --set federation.clients_per_round=21",
        "there are only federation.clients = 20 clients.",
    ),
    (
        "run --set federation.clients=3 --set federation.clients_per_round=3",
        "fewer than the 5 sizes.",
    ),
    ("run --set federation.clients=100000", "federation.clients = 100000: should be 1 to 1438"),
    (
        "run --set federation.size_fractions=[1,2]",
        "federation.size_fractions = [1.0, 2.0]: 5 fractions are needed, one per size.",
    ),
    ("run --set federation.size_fractions=[1,1,-1,1,1]", "fractions must not be negative."),
    ("run --set federation.size_fractions=[0,0,0,0,0]", "at least one fraction must be above 0."),
    (
        "run --set federation.size_assignment=budget",
        "federation.size_assignment = 'budget': needs federation.budgets, a CSV file",
    ),
    (
        "run --set federation.budgets=b.csv",
        "is only used with federation.size_assignment = 'budget'; it is 'blocks'.",
    ),
    (
        "run --set federation.sizes=resnet10",
        "federation.sizes has 1 sizes; federation.clients = 20.",
    ),
    (
        "run --set data.transform.variant=inco",
        "data.transform.variant = 'inco': is defined for cifar10, cinic10, fashion-mnist",
    ),
    ("run --set data.partition.name=file", "data.partition.path: is required and was not given."),
    ("run --set privacy.noise=1", "noise = 1 is in units of clip, which is 0"),
    (
        "run --set privacy.clip=1 --set server.weighting=samples",
        "Use server.weighting = 'uniform'.",
    ),
    (
        "run --set engine.precision=fp16 --set engine.device=cpu",
        "engine.precision = 'fp16': is for a GPU",
    ),
    (
        "bench --synthetic",
        "data.name = 'digits': --synthetic can only replace cifar10, cifar100, ",
    ),
]


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files in a folder except a run's lock file, which a command may touch."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_run: TinyRun) -> Path:
    """Return a folder with valid and invalid files."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(tiny_run.path, folder / "R", ignore=shutil.ignore_patterns("tensorboard"))
    (folder / "adir").mkdir()
    (folder / "afile").write_text("some text")
    (folder / "bad.toml").write_text("[[[")
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (folder / "ok.toml").write_text("seed = 2\n")
    (folder / "list.json").write_text("[]")
    return folder


@pytest.mark.parametrize(("invocation", "said"), WRONG, ids=[invocation for invocation, _ in WRONG])
def test_a_wrong_invocation_is_one_message(
    motley: Command, place: Path, monkeypatch: pytest.MonkeyPatch, invocation: str, said: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("MOTLEY_DATA", str(place / "no data"))
    before = contents(place)
    code, out, err = motley(*shlex.split(invocation))
    message = " ".join(err.replace("│", " ").split())
    assert code == 2, (out, err)
    assert said in message, message
    assert message.count("Did you mean") <= 1
    assert "Traceback" not in out + err and "bug in Motley" not in err
    assert contents(place) == before, "nothing is written"


def test_no_invocation_is_listed_twice() -> None:
    invocations = [invocation for invocation, _ in WRONG]
    assert len(set(invocations)) == len(invocations) and len(invocations) > 150
