"""Clients as Flower nodes: jobs and updates travel as messages. Needs the extra `flower`.

settings.py     a node's own settings (node.toml); works without Flower
run_config.py   the run's configuration, without paths, for the nodes
failures.py     reports of failures: a kind for the server, the text for the node's log
costs.py        the costs of a run's sizes, for a node with a budget
arrays.py       states as Flower's arrays, and back
engine.py       the server's side: sends jobs, receives updates
answers.py      receives answers without waiting too long for any of them
request.py      the node's side: reads and checks a message
examples.py     the node's own examples
client.py       the app that a node runs
server.py       Motley's round loop with nodes as clients; motley.cli.server_app is its app
simulation.py   both apps with Flower's simulation engine (Ray)
"""
