from verl.environments.registry import SEARCH, register

register(SEARCH, "search_r1.llm_agent.generation:SearchEnvironment")
