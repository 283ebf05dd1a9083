"""Search-R1's nq_rag.py: NQ with the passages of a retrieval cache in the prompt."""

from script_start import start

start(__file__)
