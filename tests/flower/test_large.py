"""An answer that is too large is refused before it takes memory at the server or in the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.grid import three_nodes
from tests.flower.large import MIB
from tests.flower.processes import PATIENCE, Deployment

LIMIT = 16
SETTINGS = (
    "training.rounds=3",
    "training.steps=1",
    f"engine.flower.wait_s={PATIENCE}",
    f"engine.flower.timeout_s={PATIENCE}",
    f"engine.flower.max_reply_mib={LIMIT}",
)


def peaks(deployment: Deployment) -> dict[str, float]:
    """Return the highest resident memory of the run's process and of the SuperLink so far, in MiB."""
    found = {}
    for process in deployment.processes():
        place = Path(f"/proc/{process}")
        command = (place / "cmdline").read_bytes().decode()
        name = re.search(r"flwr-serverapp|motley\.deploy\.superlink", command)
        if name is not None:
            status = (place / "status").read_text()
            (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
            found[name[0]] = int(peak) / 1024
    return found


@pytest.mark.slow
def test_an_answer_that_is_too_large_is_refused_before_it_is_stored(tmp_path: Path) -> None:
    """Client 1 sends too many pieces in round 1; in round 2, one piece that is named many times."""
    nodes = "tests.flower.large:app"
    config = three_nodes(*SETTINGS)
    with Deployment(tmp_path / "federation", config, insecure=False, nodes=nodes) as deployment:
        deployment.serve()
        deployment.join(0, 1, 2)
        run = deployment.play()
        deployment.wait(lambda: "rounds on cpu" in deployment.said("run"))
        before = peaks(deployment)
        deployment.wait(lambda: len(deployment.lines()) >= 2 or run.poll() is not None)
        growth = {name: peak - before[name] for name, peak in peaks(deployment).items()}
        print(f"growth in MiB: {growth}")
        deployment.finish(run)
        lines = deployment.lines()
        flower = sum(file.stat().st_size for file in deployment.folder.flower.glob("state.db*"))
    reason = f"it has more than {LIMIT} MiB; engine.flower.max_reply_mib = {LIMIT}."
    refused = {"1": f"its answer was refused: {reason}"}
    assert [line.get("refused") for line in lines] == [refused, refused, None]
    assert set(growth) == {"flwr-serverapp", "motley.deploy.superlink"}
    assert max(growth.values()) < MIB / 2, growth
    assert flower < MIB / 2 * 2**20
