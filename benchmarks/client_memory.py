"""Host memory with SCAFFOLD on the InCo setting: 100 clients, five ResNets, one control variate each.

    OMP_NUM_THREADS=1 python benchmarks/client_memory.py [--json FILE]

Every client stores a control variate as large as its own part in each of three rounds, as in a run,
but nothing is trained. Printed are the bytes stored and the process's peak. The memory of a Flower
node is measured by node.py.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

PRESET = "inco-cifar10"
ROUNDS = 3


def main() -> None:
    """Store every client's control variate and print what that took."""
    import torch
    from report import arguments, machine, report

    from motley.bench import synthetic_dataset
    from motley.config import load_config
    from motley.engine import LocalEngine
    from motley.federation import Federation

    options = arguments(__doc__).parse_args()
    config = load_config(
        preset=PRESET, overrides=["method.name=HeteroScaffold", "engine.device=cpu"]
    )
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            config, dataset=synthetic_dataset("cifar10"), client_state_folder=Path(folder)
        )
        assert isinstance(federation.engine, LocalEngine)
        kept, server, filed = federation.engine.clients.states.store, federation.initial_state(), 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begin = time.perf_counter()
        for round_number in range(1, ROUNDS + 1):
            for client, size in enumerate(federation.sizes):
                job = federation.job(server, round_number, client)
                memory = {
                    n: torch.randn_like(t)
                    for n, t in federation.method.client.initial_client_state(
                        size, job.state
                    ).items()
                }
                filed += (
                    sum(tensor.nbytes for tensor in memory.values()) if round_number == 1 else 0
                )
                kept.put(client, round_number, memory)
            kept.save(dict.fromkeys(range(len(federation.sizes)), round_number))
            kept.forget_older(dict.fromkeys(range(len(federation.sizes)), round_number))
        row = {
            "clients": len(federation.sizes),
            "control variates, MB": filed / 1e6,
            "peak before, MB": before,
            "peak, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "seconds per round": (time.perf_counter() - begin) / ROUNDS,
        }
        report([row], machine("torch", "numpy", "motleyfl"), options.json)


if __name__ == "__main__":
    main()
