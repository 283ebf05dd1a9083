"""The program `python -m verl.synthesis`: rows that train, from a model's verified rollouts."""
