"""Search-R1's nq_search.py: NQ for a policy that searches."""

from script_start import start

start(__file__)
