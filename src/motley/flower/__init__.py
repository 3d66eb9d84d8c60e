"""Clients that are Flower nodes: the same jobs and uploads, as messages. Needs the extra `flower`.

settings.py     a node's own settings (node.toml); works without Flower
run_config.py   the run's configuration on its way to nodes, without paths
failures.py     what the server is told of a node's failure, and what stays in the node's log
arrays.py       a state as Flower's arrays, and back, with nothing believed
engine.py       the server's side: jobs out, uploads in
answers.py      how the server waits for answers, and for none too long
client.py       the node's side: an app that SuperNodes run
server.py       the app that a SuperLink runs: Motley's own loop on that engine
simulation.py   both apps in one process with Ray
"""
