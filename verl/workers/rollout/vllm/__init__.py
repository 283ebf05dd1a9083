"""vLLM as a rollout engine: in this process (`engine.py`), or apart in servers of its own."""
