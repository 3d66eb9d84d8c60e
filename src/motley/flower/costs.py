"""Counts the costs of a run's sizes, for a node with a budget, in a separate process.

    python -m motley.flower.costs < REQUEST

Counting imports torch's compiler: 80 MB that would stay in the process that trains, at a node whose
memory is limited. So a short-lived process counts, once per run. The request is a JSON object with
the run's configuration and the shape of its data; the answer has the fields of every size's cost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from motley.assembly import build_split
from motley.config import Config
from motley.core.errors import MotleyError
from motley.flower.failures import NodeError
from motley.flower.request import Request
from motley.models.inputs import ImageShape, shape_from_json, shape_to_json
from motley.plan import Cost, costs_of
from motley.settings import validate


def count_costs(request: Request) -> dict[str, Cost]:
    """Return the costs of a run's sizes, the largest first."""
    asked = {
        "config": request.config.to_toml(),
        "inputs": shape_to_json(request.shape),
        "classes": request.classes,
    }
    return {size: Cost(**fields) for size, fields in _count_apart(json.dumps(asked)).items()}


@lru_cache(maxsize=1)
def _count_apart(asked: str) -> dict[str, dict[str, int]]:
    """Ask another process, and keep the answer: the next message asks for the same run."""
    command = [sys.executable, "-m", "motley.flower.costs"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodeError("bad-config", done.stderr.strip())
    answer: dict[str, dict[str, int]] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Count the costs of the run on the standard input."""
    asked: dict[str, Any] = json.load(sys.stdin)
    try:
        config = validate(Config, tomllib.loads(asked["config"]))
        shape = shape_from_json(asked["inputs"])
        if isinstance(shape, ImageShape):
            shape = config.data.transform.shape_of(shape)
        costs = costs_of(build_split(config, shape, asked["classes"]), shape, config.training)
    except MotleyError as error:
        sys.exit(str(error))
    json.dump({size: asdict(cost) for size, cost in costs.items()}, sys.stdout)


if __name__ == "__main__":
    main()
