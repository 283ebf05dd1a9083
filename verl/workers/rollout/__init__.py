"""Rollout: sampling trajectories from the policy.

`native/` is our own engine and `vllm/` runs vLLM. Both keep `verl/sessions/engine_contract.py`.
"""
