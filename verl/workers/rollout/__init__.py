"""Rollout: sampling trajectories from the policy.

`base.py` is the interface of an engine, `native/` is our own engine and `vllm/` runs vLLM.
"""
