"""Motley beside other libraries for federated learning: one script per library."""
