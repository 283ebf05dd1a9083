"""Verifiers: what a response is worth, by the verifier that its row names."""

from verl.verifiers.base import CouldNotVerify, Sample, Verdict, Verifier

__all__ = ["CouldNotVerify", "Sample", "Verdict", "Verifier"]
