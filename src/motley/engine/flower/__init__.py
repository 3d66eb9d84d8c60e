"""Clients that are Flower nodes: the same jobs and uploads, as messages. Needs the extra `motleyfl[flower]`.

settings.py     what a run and a node can choose; the only file here that works without Flower
arrays.py       a state as Flower's arrays, and back, with nothing believed
engine.py       the server's side: jobs out, uploads in
answers.py      how the server waits for answers, and for none too long
client.py       the node's side: an app that SuperNodes run
server.py       the app that a SuperLink runs: Motley's own loop on that engine
simulation.py   both apps in one process with Ray
"""
