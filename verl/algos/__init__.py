"""The algorithms: advantages, losses, the KL to a reference, and what corrects a rollout engine's log-probs.

The ground floor: nothing here knows of workers or of the trainer. Importing this package registers every
estimator and loss under its name. `verl.trainer.ppo.core_algos` is the public face.
"""

from verl.algos import clipped_losses, group_estimators, importance_losses, token_estimators

__all__ = ["clipped_losses", "group_estimators", "importance_losses", "token_estimators"]
