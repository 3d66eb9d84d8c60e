"""The server: rounds, the checks of client updates, and the stages that turn updates into a new global state.

Read `rounds.py` first: it is one round from sampling to evaluation, on one page.
"""
