"""FedLab against Motley. Run it from the repository:

    python -m benchmarks.peers.fedlab_peer [--json FILE]

FedLab's standalone simulation trains the clients of a round one after the other in one process, so
it runs once with one thread of torch and once with one per core, which is torch's default. Its
handler is told which clients to sample.

What FedLab does differently: models travel as one flat tensor of their parameters, without buffers;
all uploads of a round are kept, copied twice and stacked before they are averaged; the trainer's
optimizer lasts over all clients, which makes no difference without momentum. Data sets return their
own loaders; here one that shuffles tensors in memory, which is faster than torch's DataLoader.

FedLab imports torchvision for data sets that are not used here. Beside a build of torch for CPUs
only, torchvision may fail to import; then empty modules take its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.peers.compare import main, thread_variants
from benchmarks.peers.federation import (
    DEVICE,
    Outcome,
    Workload,
    accuracy,
    clients_of_round,
    counted_steps,
    examples_of,
    initial_model,
)
from benchmarks.peers.stand_ins import replace_if_broken


class Loader:
    """Batches of a client's examples, in a new order in every epoch."""

    def __init__(self, examples: tuple[Tensor, Tensor], batch_size: int) -> None:
        self.inputs, self.targets = examples
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.targets), device=DEVICE).split(self.batch_size):
            yield self.inputs[rows], self.targets[rows]


class ClientData:
    """The data set that FedLab's trainer asks for loaders."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def get_dataloader(self, client: int, batch_size: int) -> Loader:
        """Return the loader of a client."""
        return Loader(examples_of(self.workload, client), batch_size)


def fedlab(workload: Workload, rounds: int) -> Outcome:
    """Run the federation on FedLab."""
    replace_if_broken("torchvision", "transforms")
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    class ScheduledHandler(SyncServerHandler):
        """A handler that samples the clients that all contenders sample."""

        def sample_clients(self) -> list[int]:
            """Return the clients of the next round."""
            return clients_of_round(workload, self.round + 1)

    class EvaluatedPipeline(StandalonePipeline):
        """A pipeline that evaluates the global model on the test set."""

        def evaluate(self) -> None:
            """Note the end of a round."""
            outcome.round_over(accuracy(self.handler.model, workload))

    outcome = Outcome()
    ratio = workload.clients_per_round / workload.clients
    on_gpu = DEVICE.type == "cuda"
    handler = ScheduledHandler(initial_model(workload), rounds, ratio, cuda=on_gpu)
    trainer = SGDSerialClientTrainer(initial_model(workload), workload.clients, cuda=on_gpu)
    trainer.setup_dataset(ClientData(workload))
    trainer.setup_optim(workload.epochs, workload.batch_size, workload.lr)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=workload.lr, fused=True)
    with counted_steps(outcome):
        EvaluatedPipeline(handler, trainer).main()
    return outcome


PEERS = thread_variants("FedLab", fedlab)

if __name__ == "__main__":
    main(__doc__, __spec__.name, PEERS, ["fedlab"])
