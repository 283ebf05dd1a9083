"""Search-R1's nq_rag.py: NQ with the passages of a retrieval cache in the prompt."""

import script_start  # noqa: F401
