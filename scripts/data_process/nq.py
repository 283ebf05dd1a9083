"""Search-R1's nq.py: NQ without a search engine."""

import script_start  # noqa: F401
