"""Verifiers, which score responses and are named by the rows of the data.

from verl.verifiers import Sample, Verdict, Verifier, CouldNotVerify
"""

from verl.utils.errors import CouldNotVerify
from verl.verifiers.verifier import Sample, Verdict, Verifier

__all__ = ["CouldNotVerify", "Sample", "Verdict", "Verifier"]
