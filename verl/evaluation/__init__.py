"""Evaluation of a model on benchmarks, with the agent, environments and verifiers of training."""
