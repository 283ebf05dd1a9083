"""vLLM as a rollout engine: in this process (`colocated_engine.py`), or apart in servers of its own."""
