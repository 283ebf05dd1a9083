"""The hooks and the environment that this package provides for the programs of verl (see verl/plugins.py)."""

import search_r1.llm_agent  # noqa: F401  (registers its environment)
from verl.plugins import provide

provide("agent_factory", "search_r1.llm_agent.generation:agent_factory")
provide("trajectory_metrics", "search_r1.llm_agent.generation:env_metrics")
provide("retrieval_probe", "search_r1.search.probe:RetrievalProbe")
provide("check_search", "search_r1.llm_agent.search_check:check_search")
provide("text_encoder", "search_r1.search.dense.encoder:text_encoder")
