"""The contenders of every comparison: Motley, and the control, a loop written by hand."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.peers.federation import (
    CLASSES,
    DEVICE,
    EVALUATION_BATCH,
    Outcome,
    Workload,
    accuracy,
    clients_of_round,
    data,
    examples_of,
    initial_model,
    rows_of,
    train,
)


def by_hand(workload: Workload, rounds: int) -> Outcome:
    """Run FedAvg as one would write it down, in one process."""
    outcome = Outcome()
    model = initial_model(workload)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for round_number in range(1, rounds + 1):
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client in clients_of_round(workload, round_number):
            model.load_state_dict(state)
            outcome.steps += train(model, workload, *examples_of(workload, client))
            for name, tensor in model.state_dict().items():
                total[name] += tensor
        state = {name: tensor / workload.clients_per_round for name, tensor in total.items()}
        model.load_state_dict(state)
        outcome.round_over(accuracy(model, workload))
    return outcome


def motley(workload: Workload, rounds: int, workers: int = 0, vmap_clients: int = 1) -> Outcome:
    """Run the federation on Motley. `workers` = 0 is its default: one process per core."""
    # Imported here, so that the start-up of the peers does not include it.
    import numpy as np

    from motley.core.device import on_device
    from motley.data import Partition, from_datasets
    from motley.federation import Federation
    from motley.runs.callbacks import Callback
    from motley.runs.run import run_rounds
    from motley.server.record import RoundRecord
    from motley.server.state import ServerState

    examples = data(workload)
    dataset = from_datasets(
        (examples.inputs.cpu(), examples.targets.cpu()),
        (examples.test_inputs.cpu(), examples.test_targets.cpu()),
        inputs="array",  # used as they are: no transform
        classes=CLASSES,
    )
    rows = [rows_of(workload, client) for client in range(workload.clients)]
    offsets = np.arange(workload.clients + 1) * workload.examples_per_client
    federation = Federation(
        models={"model": workload.build},
        data=dataset,
        partition=Partition(np.concatenate(rows), offsets),
        clients=workload.clients,
        clients_per_round=workload.clients_per_round,
        split="homogeneous",
        training={
            "rounds": rounds,
            "epochs": workload.epochs,
            "batch_size": workload.batch_size,
            "optimizer": {"name": "sgd", "lr": workload.lr},
        },
        settings={
            "federation": {"sampler": "fedml"},
            "server": {"weighting": "samples", "ema_decay": 0},
            "evaluation": {"every": 1, "batch_size": EVALUATION_BATCH},
            "engine": {
                "device": DEVICE.type,
                "precision": "fp32",  # as torch's, without tf32
                "slots": workload.clients_per_round if DEVICE.type == "cuda" else 0,
                "workers": workers,
                "vmap_clients": vmap_clients,
            },
        },
    )
    server = federation.initial_state()
    weights = initial_model(workload).state_dict()
    assert weights.keys() == server.state.keys()
    # In the memory layout of the server's state, which is channels last on a GPU.
    state = {name: on_device(tensor, DEVICE) for name, tensor in weights.items()}
    server = dataclasses.replace(server, state=state)
    outcome = Outcome()

    class Watch(Callback):
        """Notes the end of each round."""

        def on_round(self, server: ServerState, record: RoundRecord) -> None:
            (score,) = record.scores.values()
            outcome.round_over(score.accuracy)
            outcome.steps += record.num_steps

    # The loop of `motley run`: a round is evaluated while the next one begins.
    run_rounds(federation, server, [Watch()])
    return outcome
