"""One client's side of a federation: everything that it needs to train one part of one size.

job.py          the server's request to a client
learner.py      a client in training: the `Step` that its algorithm sees
training.py     the `[training]` table, and the plan of a round that follows from it
batches.py      the batches of a plan, on the device
optimizers.py   Adam and SGD on a CPU, without torch.optim's imports
own_optimizer.py  any class of torch optimizers, by its dotted path
weights.py      single precision, or 16-bit copies of single-precision weights
fused.py        Motley's kernels in the place of a model's layers
compilation.py  models compiled by torch
state_store.py  the clients' states between rounds
encoding.py     16-bit uploads with error feedback
clients.py      the clients that a process runs, whichever engine runs them

The engines, which run many clients, and a Flower node, which runs one, use the same code.
"""

from motley.client import own_optimizer
from motley.client.clients import Clients
from motley.client.job import Job

__all__ = ["Clients", "Job", "own_optimizer"]
