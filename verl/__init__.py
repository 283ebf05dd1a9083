"""The reinforcement-learning framework: batches, process groups, trainer and workers."""

__version__ = "0.1.0"
