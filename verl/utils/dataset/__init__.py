"""The place where verl has its data sets, for users who import them from there (see rl_dataset.py)."""
