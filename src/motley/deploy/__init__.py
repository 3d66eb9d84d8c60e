"""A federation on several machines: a folder that has all it takes, and Flower's commands with the right flags."""
