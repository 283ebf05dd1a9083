"""The contract between the agent, which plays trajectories, and the engines, which sample them.

`engine_contract.py` is the interface of an engine, and `stop.py` says when a token completes a stop string.
"""
