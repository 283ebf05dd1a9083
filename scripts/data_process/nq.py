"""Search-R1's nq.py: NQ without a search engine."""

from script_start import start

start(__file__)
