"""Search-R1's nq_search.py: NQ for a policy that searches."""

import script_start  # noqa: F401
