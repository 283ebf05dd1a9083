"""Rollout: sampling trajectories from the policy. `base.py` is the interface, `native/` our engine."""
