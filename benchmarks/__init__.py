"""Scripts that measure Motley, each with its own command line."""
