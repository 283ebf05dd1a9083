"""The algorithms, a file per family; `verl.trainer.ppo.core_algos` has them all under one name."""
