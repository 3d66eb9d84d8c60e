"""A federation on several machines: its folder, its keys, and the processes that Flower needs."""
