"""Flower's simulation engine against Motley. Run it from the repository:

    python -m benchmarks.peers.flower [--json FILE]

Flower runs its own FedAvg strategy on its simulation engine, with one Ray actor per core and one
thread per actor. The client is as lean as a Flower client can be: model and data are made once per
actor, and its loop is the control's.

What Flower does differently: every client's weights travel twice between processes, as serialized
arrays in messages through Ray; the driver looks for replies at intervals; the server evaluates with
all cores while the actors wait. Flower samples clients itself, so that they are not the same ones
as in the other contenders.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
from torch import nn

os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.compare import CORES, Contender, main
from benchmarks.peers.federation import (
    WORKLOADS,
    Outcome,
    Workload,
    accuracy,
    examples_of,
    initial_model,
    train,
)

client_app = ClientApp()


@cache
def actor_model(workload: str) -> nn.Module:
    """Return the one model of this actor."""
    torch.set_num_threads(1)
    return initial_model(WORKLOADS[workload])


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train on one client's examples and send the weights back."""
    name = str(message.content["config"]["workload"])
    model, workload = actor_model(name), WORKLOADS[name]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = examples_of(workload, int(context.node_config["partition-id"]))
    steps = train(model, workload, inputs, targets)
    metrics = MetricRecord({"num-examples": len(targets), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def flower(workload: Workload, rounds: int) -> Outcome:
    """Run the federation on Flower's simulation engine."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(CORES)  # of the server's evaluation
    outcome = Outcome()
    model = initial_model(workload)
    strategy = FedAvg(
        fraction_train=workload.clients_per_round / workload.clients,
        fraction_evaluate=0.0,
        min_train_nodes=workload.clients_per_round,
        min_available_nodes=workload.clients,
        train_metrics_aggr_fn=lambda replies, weighted_by: MetricRecord(
            {"steps": sum(int(reply["metrics"]["steps"]) for reply in replies)}
        ),
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        score = accuracy(model, workload)
        if server_round > 0:  # Flower evaluates the initial model, too
            outcome.round_over(score)
        return MetricRecord({"accuracy": score})

    server_app = ServerApp()

    @server_app.main()
    def run_server(grid: Grid, context: Context) -> None:
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            rounds,
            train_config=ConfigRecord({"workload": workload.name}),
            evaluate_fn=evaluate,
        )
        for metrics in result.train_metrics_clientapp.values():
            outcome.steps += int(metrics["steps"])

    backend = {
        "init_args": {"num_cpus": CORES, "log_to_driver": False, "logging_level": "ERROR"},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server_app, client_app, num_supernodes=workload.clients, backend_config=backend)
    return outcome


PEERS = [Contender("Flower", flower, f"{CORES} Ray actors")]

if __name__ == "__main__":
    # As a module with a name, so that Ray's actors import the client instead of receiving its code.
    from benchmarks.peers.flower import PEERS as NAMED_PEERS

    main(__doc__, __spec__.name, NAMED_PEERS, ["flwr", "ray"])
