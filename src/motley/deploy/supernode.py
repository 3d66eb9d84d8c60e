"""The SuperNode process of a node: Flower's `flower-supernode`, which ends with its parent.

    python -m motley.deploy.supernode FLAGS_OF_FLOWER_SUPERNODE

If `motley deploy node` is killed, Flower's own command would live on. It would stay connected and
fetch messages without answering them, and the server would refuse the node when it is started
again.
"""

from __future__ import annotations

import os

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode.cli import flower_supernode

if __name__ == "__main__":
    start_parent_process_monitor(os.getppid())
    flower_supernode()
