"""What sizes cost, counted and measured, and which of them a fleet of devices gets."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from motley.cli.plan import costs_in, table
from motley.core.errors import MotleyError
from motley.counting import LiveBytes
from motley.federation import Federation
from motley.plan import Budget, Cost, assigned, cost_of, largest_fitting, read_budgets
from tests.cli.conftest import call, overrides
from tests.conftest import refused, tiny_config

WIDTH = ("split.name=width", "split.rates=[1,0.5,0.25,0.125]", "model.sizes=['resnet18']")
DEVICE = (*WIDTH, "model.resnet.width=0.5", "data.transform.resize=32", "training.batch_size=64")


def fleet(
    folder: Path, lines: list[str], header: str = "client,memory_mb,parameters,gflops"
) -> Path:
    file = folder / "budgets.csv"
    file.write_text("\n".join([header, *lines]) + "\n")
    return file


def made_up_fleet(folder: Path) -> Path:
    """Fifty devices: phones with little memory, boards with little of everything, a few servers without limits."""
    numbers = np.random.default_rng(0)
    lines = []
    for client in range(50):
        memory, parameters, gflops = numbers.uniform((25, 6e4, 1), (300, 4e6, 30))
        cells = [f"{memory:.1f}", f"{parameters:.0f}", f"{gflops:.2f}"]
        kept = numbers.random(3) < 0.7
        lines.append(
            ",".join([str(client), *(c if k else "" for c, k in zip(cells, kept, strict=True))])
        )
    return fleet(folder, lines)


def test_a_fleet_of_fifty_gets_the_largest_parts_within_every_budget(tmp_path: Path) -> None:
    file = made_up_fleet(tmp_path)
    costs = costs_in(tiny_config(*DEVICE))
    chosen = {}
    for budget in read_budgets(file):
        size = largest_fitting(costs, budget)
        assert size is not None
        cost = costs[size]
        assert budget.memory_mb is None or cost.memory <= budget.memory_mb * 1e6
        assert budget.parameters is None or cost.parameters <= budget.parameters
        assert budget.gflops is None or cost.flops <= budget.gflops * 1e9
        larger = [other for other in costs.values() if other.parameters > cost.parameters]
        assert not any(budget.fits(other) for other in larger)
        chosen[budget.client] = size
    assert len(chosen) == 50 and set(chosen.values()) == set(costs)


MEASURE = """
import sys, torch
from motley.config import load_config
from motley.data import load_dataset
from motley.data.device import device_data
from motley.assembly import build_split
torch.set_num_threads(1)
sizes, config = sys.argv[1].split(","), load_config(overrides=sys.argv[2:])
data = device_data(load_dataset("digits").train, config.data.transform, torch.device("cpu"), augment=False)
split = build_split(config, data.shape, 10)

def train(size, batch, steps):
    model = split.blueprints[size].build().train()
    received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = config.training.optimizer.build(model.parameters(), torch.device("cpu"))
    images, labels = torch.randn(batch, *data.shape), torch.zeros(batch, dtype=torch.long)
    images = images.contiguous(memory_format=torch.channels_last)  # as those of a data set
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

def kilobytes(line):
    return next(int(found.split()[1]) for found in open("/proc/self/status") if found.startswith(line))

train(split.sizes[-1], 2, 1)
for size in sizes:
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew, at what is held now
    before = kilobytes("VmRSS")
    train(size, config.training.batch_size, 2)
    print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_memory_is_within_15_percent_of_what_a_process_takes() -> None:
    """A process of its own, with libraries warm; its allocator gives memory back at once.

    The peak is that of the process's own address space: what `getrusage` tells begins with the peak of the process
    that started it, which here is a test run's.
    """
    costs = costs_in(tiny_config(*DEVICE))
    sizes = list(costs)[:3]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, ",".join(sizes), *DEVICE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for size, measured in zip(sizes, done.stdout.split(), strict=True):
        assert abs(costs[size].memory / int(measured) - 1) < 0.15, (
            size,
            costs[size].memory,
            measured,
        )


MEASURE_LSTM = """
import sys, torch
from motley.assembly import build_split
from motley.config import load_config
from motley.models.inputs import TokenShape
from motley.plan import cost_of
torch.set_num_threads(1)
overrides = ["data.name=shakespeare", "model.sizes=[lstm1, lstm2]", "training.batch_size=64"]
config = load_config(overrides=overrides)
split = build_split(config, TokenShape(80, 80), 80)

def train(size, batch, steps):
    model = split.blueprints[size].build().train()
    received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = config.training.optimizer.build(model.parameters(), torch.device("cpu"))
    tokens, targets = torch.randint(0, 80, (batch, 80)), torch.zeros(batch, dtype=torch.long)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()

def kilobytes(line):
    return next(int(found.split()[1]) for found in open("/proc/self/status") if found.startswith(line))

train("lstm1", 2, 1)
for size in split.sizes:
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS")
    train(size, config.training.batch_size, 2)
    print((kilobytes("VmHWM") - before) * 1024, cost_of(split, size, TokenShape(80, 80), config.training).memory)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_memory_of_an_lstm_is_within_15_percent_of_what_a_process_takes() -> None:
    """OneDNN keeps a workspace for the backward pass; position by position, torch would not."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE_LSTM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        measured, planned = map(int, line.split())
        assert abs(planned / measured - 1) < 0.15, (measured, planned)


def test_costs_by_hand() -> None:
    """One hidden layer of 8 units over 16 pixels, 10 classes, a batch of 4, SGD without momentum."""
    tiny = (
        "model.sizes=['mlp1']",
        "model.mlp.hidden=8",
        "data.transform.resize=4",
        "training.batch_size=4",
    )
    config = tiny_config(*tiny, "training.optimizer={name='sgd', lr=0.1}")
    cost = costs_in(config)["mlp1"]
    assert cost.parameters == 16 * 8 + 8 + 8 * 10 + 10
    forward = 2 * 4 * (16 * 8 + 8 * 10)
    assert (
        cost.flops == 2 * forward + 2 * 4 * 8 * 10
    )  # weights' gradients as much again, and the hidden layer's input
    assert cost.traffic == 2 * 4 * cost.parameters
    half = costs_in(tiny_config(*tiny, "uplink.dtype=fp16"))["mlp1"]
    assert half.traffic == (4 + 2) * cost.parameters
    assert cost.exchange_memory == 5 * 4 * cost.parameters
    assert 3 * 4 * cost.parameters < cost.step_memory < 20 * 4 * cost.parameters
    assert cost.memory == max(cost.step_memory, cost.exchange_memory)
    adam = costs_in(tiny_config(*tiny))["mlp1"]
    assert adam.step_memory - cost.step_memory == 2 * 4 * cost.parameters
    double = costs_in(tiny_config(*tiny, "training.batch_size=8"))["mlp1"]
    assert double.activations > 1.8 * cost.activations and double.parameters == cost.parameters


def test_the_copies_of_a_convolutions_weight_are_in_the_peak() -> None:
    """By hand: one 1x1 convolution from 2 to 3 channels, on one image of 4x4 pixels."""
    weight = torch.randn(3, 2, 1, 1, device="meta", requires_grad=True)
    image = torch.randn(1, 2, 4, 4, device="meta", requires_grad=True)
    output, gradients = 3 * 16 * 4, (3 * 16 + 2 * 16 + 3 * 2) * 4
    with LiveBytes([weight, image]) as live:
        result = torch.nn.functional.conv2d(image, weight)
        assert live.peak == output + 2 * weight.nbytes
        torch.autograd.grad(result, (image, weight), torch.ones_like(result))
    assert live.peak == output + gradients + 3 * weight.nbytes


def test_counting_leaves_no_trace_in_the_split() -> None:
    federation = Federation(tiny_config(*WIDTH))
    split, shape = federation.split, federation.engine.clients.data.shape  # type: ignore[attr-defined]
    costs = [cost_of(split, size, shape, federation.config.training) for size in split.sizes]
    assert all(p.grad is None for b in split.blueprints.values() for p in b.module.parameters())
    assert [cost.memory for cost in costs] == sorted((cost.memory for cost in costs), reverse=True)


def test_a_federation_deals_sizes_by_budget(tmp_path: Path) -> None:
    costs = costs_in(tiny_config(*WIDTH))
    limits = [cost.parameters for cost in costs.values()] + [1e12, 1e12]
    file = fleet(
        tmp_path, [f"{client},{limit}" for client, limit in enumerate(limits)], "client,parameters"
    )
    given = (f"federation.budgets={file}", "federation.size_assignment=budget", "training.steps=1")
    federation = Federation(tiny_config(*WIDTH, *given))
    assert federation.sizes == (*costs, "resnet18-w1", "resnet18-w1")
    _, record = federation.run_round(federation.initial_state())
    assert not record.refused
    with pytest.raises(
        MotleyError,
        match=r"client 6 is missing; federation\.clients = 7 needs one line per client, 0 to 6",
    ):
        Federation(tiny_config(*WIDTH, *given, "federation.clients=7"))
    with pytest.raises(MotleyError, match="no size fits client 1"):
        assigned(costs, [Budget("0"), Budget("1", parameters=1)], 2)


@pytest.mark.parametrize(
    ("header", "line", "said"),
    [
        ("client,memory", "0,5", "unknown column 'memory'. Did you mean 'memory_mb'?"),
        (
            "client,gflops",
            "0,many",
            "line 2: gflops = 'many': should be a number above 0, or empty.",
        ),
        ("client,gflops", "0,-1", "line 2: gflops = '-1': should be a number above 0"),
        ("gflops", "3", "needs a column 'client'"),
        ("client,gflops", "0,1,2", "line 2: has more cells than there are columns."),
        ("gflops,client", "3", "line 2: client is empty"),
        ("client,gflops,gflops", "0,1,2", "column 'gflops' occurs twice."),
        ("client,gflops", '"0,1', "cannot be read: unexpected end of data."),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, header: str, line: str, said: str) -> None:
    with pytest.raises(MotleyError) as raised:
        read_budgets(fleet(tmp_path, [line], header))
    assert said in str(raised.value) and "budgets.csv" in str(raised.value)
    assert "federation.size_assignment = 'budget': needs federation.budgets" in refused(
        "federation.size_assignment=budget"
    )


def test_a_client_that_is_listed_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = fleet(tmp_path, ["phone,100", "", "watch,1", "phone ,1000"], "client,memory_mb")
    with pytest.raises(
        MotleyError, match=r"budgets\.csv: client 'phone' is listed twice, in lines 2 and 5\."
    ):
        read_budgets(file)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_bytes("client,parameters\r\nTelefon-ä,5\r\n".encode("utf-8-sig"))
    assert read_budgets(file) == [Budget("Telefon-ä", parameters=5.0)]


def test_semicolons_separate_columns_too(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("client;parameters;gflops\nphone;5;\n")
    assert read_budgets(file) == [Budget("phone", parameters=5.0)]


def test_names_are_clients_in_the_order_of_their_lines(tmp_path: Path) -> None:
    costs = costs_in(tiny_config(*WIDTH))
    largest, smallest = next(iter(costs)), list(costs)[-1]
    least = costs[smallest].parameters
    lines = ["laptop,", f"watch,{least}", f"7,{least}", "board,", "phone,", "desk,"]
    file = fleet(tmp_path, lines, "client,parameters")
    given = (f"federation.budgets={file}", "federation.size_assignment=budget")
    federation = Federation(tiny_config(*WIDTH, *given))
    assert federation.sizes == (largest, smallest, smallest, largest, largest, largest)
    with pytest.raises(
        MotleyError, match=r"it has 6 lines; federation\.clients = 7 needs one line per client\."
    ):
        Federation(tiny_config(*WIDTH, *given, "federation.clients=7"))
    with pytest.raises(MotleyError, match=r"no size fits client 1 \('watch'\)\."):
        assigned(costs, [Budget("phone"), Budget("watch", parameters=1)], 2)


def test_numbers_are_clients_in_any_order() -> None:
    costs = costs_in(tiny_config(*WIDTH))
    largest, smallest = next(iter(costs)), list(costs)[-1]
    small = costs[smallest].parameters
    assert assigned(costs, [Budget("1"), Budget("0", parameters=small)], 2) == (smallest, largest)
    with pytest.raises(
        MotleyError,
        match=r"it has 3 lines; federation\.clients = 2 needs one line per client, 0 to 1\.",
    ):
        assigned(costs, [Budget("0"), Budget("1"), Budget("2")], 2)
    with pytest.raises(
        MotleyError, match=r"client 2 is missing; federation\.clients = 1000000000000 needs"
    ):
        assigned(costs, [Budget("0"), Budget("1")], 10**12)


@pytest.mark.parametrize("first", ["client", "size"])
def test_no_number_is_cut_at_80_columns(first: str) -> None:
    wide = Cost(117_452_362, int(123.4e9), int(5_836.2e6), int(13_378.2e6), 0, int(1_139.73e6))
    rows = [("watch-of-a-long-name", "resnet26-w0.125", wide), ("laptop", "none fits", None)]
    console = Console(width=80, file=StringIO())
    with console.capture() as captured:
        console.print(table(rows, tiny_config(), first))
    out = captured.get()
    for number in ("117,452,362", "123", "5,836.2", "13,378.2", "1,139.73"):
        assert number in out
    assert "\u2026" not in out and max(map(len, out.splitlines())) <= 80


def test_a_missing_data_set_is_told_with_the_way_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_DATA", str(tmp_path))
    answer = call("plan", "--preset", "pfl-cifar10")
    assert answer.code == 2 and "Looked in:" in answer.err and "--synthetic" in answer.err
    assert call("plan", "--preset", "pfl-cifar10", "--synthetic").code == 0
    absent = call("plan", *overrides("data.name=npz", "data.path=absent.npz"))
    assert absent.code == 2 and "--synthetic" not in absent.err


def test_the_command_prints_a_line_a_client_and_how_many_got_what(tmp_path: Path) -> None:
    file = fleet(tmp_path, ["phone,,60000,", "watch,,10,", "desk,,,"])
    answer = call("plan", "--budgets", file, *overrides(*WIDTH))
    assert answer.code == 0
    rows = {
        line.split("│")[1].strip(): line for line in answer.out.splitlines() if line.startswith("│")
    }
    assert (
        "resnet18-w1 " in rows["desk"]
        and "none fits" in rows["watch"]
        and "resnet18-w" in rows["phone"]
    )
    assert answer.out.splitlines()[-1].endswith("none: 1")
    costs = costs_in(tiny_config(*WIDTH))
    assert f"{costs['resnet18-w1'].parameters:,}" in rows["desk"]
    sizes = call("plan", *overrides(*WIDTH)).out
    assert all(size in sizes for size in costs) and "GFLOPs" in sizes and "batch of 32" in sizes


def test_a_large_fleet_is_summarized_by_size(tmp_path: Path) -> None:
    """A terminal table of a million rows does not end."""
    lines = ["phone,,60000,", *(f"desk{number},,," for number in range(1_200)), "watch,,10,"]
    answer = call("plan", "--budgets", fleet(tmp_path, lines), *overrides(*WIDTH))
    assert answer.code == 0 and "desk7" not in answer.out
    assert "no size fits: watch" in answer.out
    assert "resnet18-w1: 1201" in answer.out and answer.out.splitlines()[-1].endswith("none: 1")


def test_planning_allocates_nothing() -> None:
    config = tiny_config(
        "split.name=width", "split.rates=[1]", "model.sizes=['resnet152']", "model.resnet.width=4"
    )
    before = torch.zeros(1)
    cost = costs_in(config)["resnet152-w1"]
    assert cost.memory > 10e9 and before.numel() == 1
