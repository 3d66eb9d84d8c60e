"""Studies: the papers' tables and figures as declared sweeps, each beside the paper's own numbers."""
