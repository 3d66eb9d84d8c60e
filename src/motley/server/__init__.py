"""The server: rounds, the checks of client updates, and the stages of the aggregation.

Read `rounds.py` first: it is one round from sampling to evaluation, on one page.
"""
