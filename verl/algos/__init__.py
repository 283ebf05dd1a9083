"""The algorithms: advantages, losses, the KL to a reference, and corrections of a rollout engine's log-probs.

This is the ground floor: nothing here knows of workers or of the trainer. Importing this package registers
every estimator and every loss under its name. `verl.trainer.ppo.core_algos` is the public face.
"""

from verl.algos import clipped_losses, group_estimators, importance_losses, token_estimators

__all__ = ["clipped_losses", "group_estimators", "importance_losses", "token_estimators"]
