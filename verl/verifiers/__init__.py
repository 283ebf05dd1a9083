"""Verifiers: what a response is worth, by names that the rows of the data give.

from verl.verifiers import Sample, Verdict, Verifier, CouldNotVerify
"""

from verl.verifiers.base import CouldNotVerify, Sample, Verdict, Verifier

__all__ = ["CouldNotVerify", "Sample", "Verdict", "Verifier"]
