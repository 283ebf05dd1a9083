"""Rollout: sampling trajectories from the policy. `engine.py` is the interface, `native/` our engine."""
