"""Runs: the folder of a run, its metrics, its checkpoints, and the loop that writes them."""
