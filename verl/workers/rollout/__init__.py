"""Rollout: sampling trajectories from the policy.

`native/` is our own engine, `vllm/` runs vLLM, and `remote/` asks servers that run already. All of them
implement `verl/sessions/engine_contract.py`.
"""
