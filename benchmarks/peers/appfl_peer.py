"""APPFL against Motley. Run it from the repository:

    python -m benchmarks.peers.appfl_peer [--json FILE]

APPFL's synchronous simulator (`appfl.vsim`) trains the clients of a round one after the other in
one process, so it runs once with one thread of torch and once with one per core, which is torch's
default. The driver is told which clients to sample.

What APPFL does differently: every client is an agent with a model, a trainer, a DataLoader and a
log file of its own, and computes its training accuracy; weights are cloned several times between
trainer, agent, scheduler and aggregator; the simulator also keeps a virtual clock, whose profiles
are all alike here. `optimize_memory` is off: by default APPFL collects garbage many times per
client, and 11 rounds of the MLP did not end within ten minutes on a busy machine. The server's
test set is loaded in batches of the size that all contenders use; by default it would be evaluated
one example at a time.

APPFL imports piq, which scores images and needs torchvision, for reports that are not made here.
Beside a build of torch for CPUs only, it may fail to import; then an empty module takes its place.
"""

from __future__ import annotations

import tempfile
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.compare import main, thread_variants
from benchmarks.peers.federation import (
    EVALUATION_BATCH,
    ROOT,
    Outcome,
    Workload,
    clients_of_round,
    counted_steps,
    data,
    examples_of,
)
from benchmarks.peers.stand_ins import replace_if_broken


def settings(workload: Workload, rounds: int, folder: str) -> dict[str, Any]:
    """Return the configuration of server and clients."""
    parts = str(ROOT / "benchmarks/peers/appfl_parts.py")
    return {
        "model_configs": {
            "model_path": parts,
            "model_name": "model",
            "model_kwargs": {"workload": workload.name},
        },
        "log_configs": {"logging_output_dirname": folder},
        "server_configs": {"optimize_memory": False},
        "algorithm_configs": {
            "num_global_epochs": rounds,
            "scheduler": "SyncScheduler",
            "scheduler_kwargs": {
                "num_clients": workload.clients,
                "num_clients_per_round": workload.clients_per_round,
                "optimize_memory": False,
            },
            "aggregator": "FedAvgAggregator",
            "aggregator_kwargs": {"client_weights_mode": "equal", "optimize_memory": False},
            "trainer": "VanillaTrainer",
            "trainer_kwargs": {
                "mode": "epoch",
                "num_local_epochs": workload.epochs,
                "optim": "SGD",
                "optim_args": {"lr": workload.lr, "fused": True},
                "loss_fn": "CrossEntropyLoss",
                "metric_path": parts,
                "metric_name": "accuracy",
                "train_batch_size": workload.batch_size,
                "train_data_shuffle": True,
                "do_validation": False,
                "do_pre_validation": False,
                "optimize_memory": False,
            },
        },
    }


def appfl(workload: Workload, rounds: int) -> Outcome:
    """Run the federation on APPFL's simulator."""
    replace_if_broken("piq")
    from appfl.agent.sim_client import SimClientAgent
    from appfl.agent.sim_server import SimServerAgent
    from appfl.vsim import ClientProfile, SyncSimDriver

    class ScheduledDriver(SyncSimDriver):
        """A driver that samples the clients that all contenders sample, and notes rounds' ends."""

        def _select_participants(self) -> list[str]:
            return [str(client) for client in clients_of_round(workload, self._round + 1)]

        def _run_round(self) -> bool:
            completed = super()._run_round()
            outcome.round_over(self.history[-1]["global_val_accuracy"])
            return completed

    outcome = Outcome()
    examples = data(workload)
    with tempfile.TemporaryDirectory() as folder:
        config = settings(workload, rounds, folder)
        server = SimServerAgent(config, num_clients=workload.clients)
        test_set = TensorDataset(examples.test_inputs, examples.test_targets)
        server.load_server_val_dataset(test_set)
        server._val_dataloader = DataLoader(test_set, batch_size=EVALUATION_BATCH)
        clients = [
            SimClientAgent(config, str(client), TensorDataset(*examples_of(workload, client)))
            for client in range(workload.clients)
        ]
        for client in clients:
            client.optimize_memory = False  # a simulated client reads no setting for it
        driver = ScheduledDriver(
            server,
            clients,
            {client.get_id(): ClientProfile() for client in clients},
            participants_per_round=workload.clients_per_round,
            logger=server.logger,
            eval_every=1,
            target_rounds=rounds,
        )
        with counted_steps(outcome):
            driver.run()
    return outcome


PEERS = thread_variants("APPFL", appfl)

if __name__ == "__main__":
    main(__doc__, __spec__.name, PEERS, ["appfl"])
