"""fluke against Motley. Run it from the repository:

    python -m benchmarks.peers.fluke_fl [--json FILE]

fluke trains the clients of a round one after the other in one process; its parallel mode is for
several GPUs. So it runs once with one thread of torch and once with one per core, which is torch's
default. Clients and server are its own classes; the server is told which clients to sample.

What fluke does differently: every client keeps a model and an optimizer of its own between rounds
(kept in memory here, the faster of its two modes); a message to a client carries a copy of the
model; an optimizer lasts over all rounds, which makes no difference without momentum; it reads the
loss after every step, steps a learning rate schedule after every epoch, and draws a progress bar.
Of its evaluation's seven metrics only the accuracy is computed here, as in the other contenders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.compare import main, thread_variants
from benchmarks.peers.federation import (
    CLASSES,
    EVALUATION_BATCH,
    Outcome,
    Workload,
    clients_of_round,
    counted_steps,
    data,
    examples_of,
    initial_model,
)


def fluke(workload: Workload, rounds: int) -> Outcome:
    """Run the federation on fluke."""
    from fluke import FlukeENV
    from fluke.algorithms import CentralizedFL
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.evaluation import ClassificationEval
    from fluke.server import Server
    from fluke.utils import ServerObserver
    from torch.nn import CrossEntropyLoss
    from torchmetrics import Accuracy

    class ScheduledServer(Server):
        """A server that samples the clients that all contenders sample."""

        sampled_rounds = 0

        def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
            """Return the clients of the next round."""
            self.sampled_rounds += 1
            return [self.clients[i] for i in clients_of_round(workload, self.sampled_rounds)]

    class Clock(ServerObserver):
        """Notes the end of each round."""

        def server_evaluation(self, round: int, eval_type: str, evals: Any, **_: Any) -> None:
            """Note the round's accuracy; at its end, fluke evaluates the last round again."""
            if len(outcome.ends) < rounds:
                outcome.round_over(float(evals["accuracy"]))

    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=True)
    metric = Accuracy(task="multiclass", num_classes=CLASSES, average="micro")
    environment.set_evaluator(ClassificationEval(1, CLASSES, accuracy=metric))
    optimizer = OptimizerConfigurator({"name": "SGD", "lr": workload.lr, "fused": True})
    clients = []
    for index in range(workload.clients):
        loader = FastDataLoader(
            *examples_of(workload, index),
            num_labels=CLASSES,
            batch_size=workload.batch_size,
            shuffle=True,
        )
        client = Client(
            index=index,
            train_set=loader,
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=CrossEntropyLoss(),
            local_epochs=workload.epochs,
        )
        clients.append(client)
    examples = data(workload)
    test_set = FastDataLoader(
        examples.test_inputs,
        examples.test_targets,
        num_labels=CLASSES,
        batch_size=EVALUATION_BATCH,
    )
    server = ScheduledServer(initial_model(workload), test_set, clients, weighted=True)
    algorithm = CentralizedFL(
        workload.clients, data_splitter=None, hyper_params={}, clients=clients, server=server
    )
    outcome = Outcome()
    # Evaluations are events of the algorithm, which attaches no observers of servers to itself.
    algorithm.attach(Clock())
    with counted_steps(outcome):
        algorithm.run(rounds, workload.clients_per_round / workload.clients)
    return outcome


PEERS = thread_variants("fluke", fluke)

if __name__ == "__main__":
    main(__doc__, __spec__.name, PEERS, ["fluke-fl"])
