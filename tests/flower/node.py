"""A node that runs another client app than Motley's own: `python -m tests.flower.node FOLDER MODULE:ATTRIBUTE`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from motley.deploy.node import be_node

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    be_node(Path(sys.argv[1]) / "node.toml", 120.0, app=sys.argv[2])
