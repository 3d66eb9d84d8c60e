"""The client of `flower_simulation.py`: plain torch on tensors in memory, as lean as a Flower client can be.

It is a module of its own so that Ray sends its name to the workers and not its code. Data and model are made once a
worker.
"""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from motley.config import Config, load_config
from motley.data import load_dataset
from motley.models import MODELS

CLIENTS = 100
A_ROUND = 50

app = ClientApp()


def federation_config(epochs: int = 1, rounds: int = 1, stack: int = 1) -> Config:
    """Return the federation that both simulators play: plain FedAvg of a small MLP on digits of 8x8 pixels."""
    settings = {
        "model.sizes": ["mlp2"],
        "data.transform.resize": 8,
        "data.partition.name": "iid",
        "split.name": "homogeneous",
        "federation.clients": CLIENTS,
        "federation.clients_per_round": A_ROUND,
        "training.rounds": rounds,
        "training.epochs": epochs,
        "training.batch_size": 10,
        "training.optimizer.name": "sgd",
        "training.optimizer.lr": 0.1,
        "server.weighting": "samples",
        "server.ema_decay": 0,
        "evaluation.every": rounds,
        "engine.vmap_clients": stack,
        "engine.device": "cpu",
    }
    return load_config(overrides=[f"{name}={value}" for name, value in settings.items()])


@cache
def model() -> nn.Module:
    """Return the one model of this worker."""
    torch.set_num_threads(1)
    config = federation_config()
    shape = load_dataset("digits").shape
    return MODELS["mlp2"].make(config.model.mlp, shape, 10).train()


@cache
def examples() -> list[tuple[Tensor, Tensor]]:
    """Return every client's images and labels, dealt as Motley deals them."""
    config, data = federation_config(), load_dataset("digits").train
    images = torch.from_numpy(data.inputs).permute(0, 3, 1, 2).float().div(255)
    labels = torch.from_numpy(data.targets)
    partition = config.data.partition.split(data.targets, CLIENTS, config.seed)
    return [
        (images[mine], labels[mine]) for mine in (partition.of(client) for client in range(CLIENTS))
    ]


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on one client's examples and send the weights back."""
    network, (images, labels) = model(), examples()[int(context.node_config["partition-id"])]
    work = message.content["config"]
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=work["lr"], fused=True)
    losses = []
    for _ in range(work["epochs"]):
        for rows in torch.randperm(len(labels)).split(work["batch-size"]):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    metrics = MetricRecord({"num-examples": len(labels), "train_loss": sum(losses) / len(losses)})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
