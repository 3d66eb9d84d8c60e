"""Runs: the run folder, its metrics and checkpoints, and the loop that writes them."""
