"""Rollouts on servers that run already: the engine of `rollout.name=remote`, and its client."""
