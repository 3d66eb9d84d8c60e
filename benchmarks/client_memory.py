"""Host memory with SCAFFOLD on the InCo setting: 100 clients, five ResNets, a control variate each. Run it so:

    OMP_NUM_THREADS=1 python benchmarks/client_memory.py [--json FILE]

Every client files a control variate as large as its own part, three rounds of them, as `MemoryStore` would see it in a
run; nothing is trained. Printed are the bytes filed and the process's peak.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import arguments, machine, report

from motley.bench import stand_in
from motley.config import load_config
from motley.engine import LocalEngine
from motley.federation import Federation

ROUNDS = 3


def main() -> None:
    """File every client's control variate and print what that took."""
    options = arguments(__doc__).parse_args()
    config = load_config(preset="inco-cifar10", overrides=["method.name=HeteroScaffold", "engine.device=cpu"])
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(config, dataset=stand_in("cifar10"), memory_folder=Path(folder))
        assert isinstance(federation.engine, LocalEngine)
        store, server, filed = federation.engine.clients.memory, federation.start(), 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begin = time.perf_counter()
        for round_number in range(1, ROUNDS + 1):
            for client, size in enumerate(federation.sizes):
                job = federation.job(server, round_number, client)
                memory = {n: torch.randn_like(t) for n, t in federation.method.memory(size, job.state).items()}
                filed += sum(tensor.nbytes for tensor in memory.values()) if round_number == 1 else 0
                store.put(client, round_number, memory)
            store.save(dict.fromkeys(range(len(federation.sizes)), round_number))
            store.forget_older(dict.fromkeys(range(len(federation.sizes)), round_number))
        row = {
            "clients": len(federation.sizes),
            "control variates, MB": filed / 1e6,
            "peak before, MB": before,
            "peak, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "seconds a round": (time.perf_counter() - begin) / ROUNDS,
        }
        report([row], machine("torch", "numpy", "motleyfl"), options.json)


if __name__ == "__main__":
    sys.exit(main())
