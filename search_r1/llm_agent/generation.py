"""LLMGenerationManager: the agent loop with a search engine, under Search-R1's names.

The loop is `verl/agent/`; what a search does is `search_environment.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from search_r1.llm_agent.search_environment import HINT, format_observation, search_metrics
from search_r1.search.client import FoundDocument, SearchClient
from verl.agent.agent import EnvironmentAgent
from verl.agent.loop import LoopEvent
from verl.agent.trajectory import AgentConfig, Trajectory, generation_eos_ids
from verl.config import Config
from verl.config.environments import EnvironmentConfig
from verl.environments.executors import Environments
from verl.environments.registry import SEARCH
from verl.protocol import DataProto
from verl.workers.rollout.base import RolloutEngine


@dataclass(frozen=True)
class GenerationConfig(AgentConfig):
    """How trajectories with searches are made.

    `search_url`: where a manager that gets no search client searches. `num_gpus`: Search-R1 gives it;
    nothing reads it, as batches need no multiple of it here.
    """

    num_gpus: int | None = None
    no_think_rl: bool = False
    search_url: str | None = None
    topk: int = 3
    do_search: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk < 1:
            raise ValueError(f"topk: found {self.topk}, expected 1 or more")
        if self.no_think_rl:
            raise ValueError(
                "no_think_rl: found true; only false works, ids that were not sampled are not trained"
            )


@dataclass(frozen=True)
class Event:
    """What `on_event` is told while trajectories run.

    kind: "text" (the policy wrote `text`) | "search" (`text` is the query) | "observation" (`documents`
    came) | "hint" (`text` is said to the policy after a turn without an action) | "end" (`text`: the reason).
    """

    kind: Literal["text", "search", "observation", "hint", "end"]
    row: int
    text: str = ""
    documents: list[FoundDocument] = field(default_factory=list)

    @classmethod
    def of_loop(cls, event: LoopEvent) -> Event:
        if event.kind == "action":
            return cls("search", event.row, event.details["query"])
        if event.kind != "observation":
            return cls(event.kind, event.row, event.text)
        documents = event.details.get("documents")
        return (
            cls("hint", event.row, HINT)
            if documents is None
            else cls("observation", event.row, documents=documents)
        )


class LLMGenerationManager(EnvironmentAgent):
    """An agent that searches, with a search client that it owns."""

    config: GenerationConfig

    def __init__(
        self,
        tokenizer: Any,
        engine: RolloutEngine,
        search_client: SearchClient | None,
        config: GenerationConfig,
        on_event: Callable[[Event], None] | None = None,
        block: EnvironmentConfig | None = None,
        code_api_url: str | None = None,
    ) -> None:
        """Without a `search_client`, one is made for `config.search_url`; without `do_search` none is needed.
        `on_event` hears what happens as it happens; it needs an engine with `partial`. block: the run's
        `environment` block, for rows with other environments. code_api_url: their code server (`CodeClient`).

        Raises ValueError for lengths that can't work, and for `do_search` without a client and an address.
        """
        if config.do_search and search_client is None:
            if config.search_url is None:
                raise ValueError(
                    "do_search: found true without a search client; expected a SearchClient, or search_url"
                )
            search_client = SearchClient(config.search_url, topk=config.topk)
        self.search_client = search_client
        search = {name: getattr(config, name) for name in ("topk", "max_turns", "do_search")}
        run_code = dict.fromkeys(("lcb", "searchcode"), {"code_api_url": code_api_url})
        environments = Environments(block, {SEARCH: {**search, "client": search_client}, **run_code})
        listener = None if on_event is None else lambda event: on_event(Event.of_loop(event))
        super().__init__(tokenizer, engine, config, environments, listener)
        empty = len(self.codec.encode(format_observation([])))
        if config.do_search and config.max_obs_length < empty:
            raise ValueError(
                f"max_obs_length: found {config.max_obs_length}, expected at least {empty}: "
                "the tags alone have so many tokens"
            )

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto:
        """As `EnvironmentAgent.run_llm_loop`; `metrics` has `retrieval/*` figures of this process too."""
        self._before = {} if self.search_client is None else self.search_client.statistics()
        return super().run_llm_loop(gen_batch)

    def figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        after = {} if self.search_client is None else self.search_client.statistics()
        return search_metrics(self._before, after, trajectories)

    def close(self) -> None:
        super().close()
        if self.search_client is not None:
            self.search_client.close()


def build_agent(
    config: Config, tokenizer: Any, engine: RolloutEngine, *, api_key: str | None = None
) -> LLMGenerationManager:
    """The agent of a training run from its whole configuration. `api_key`: of the retrieval servers.

    Raises ValueError for an address or a proxy that can't be used.
    """
    data, rollout, retriever = config.data, config.actor_rollout_ref.rollout, config.retriever
    generation = GenerationConfig(
        max_turns=config.max_turns,
        max_start_length=data.max_start_length,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_obs_length=data.max_obs_length,
        topk=retriever.topk,
        do_search=config.do_search,
        search_delay_steps=rollout.search_delay_steps,
        max_in_flight=rollout.max_in_flight,
        straggler_factor=rollout.straggler_factor,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        eos_token_ids=generation_eos_ids(config.actor_rollout_ref.model.path),
    )
    client = None
    if config.do_search:
        client = SearchClient(
            retriever.url,
            topk=retriever.topk,
            timeout=retriever.timeout,
            api_key=api_key,
            use_proxy=retriever.use_proxy,
        )
    return LLMGenerationManager(
        tokenizer,
        engine,
        client,
        generation,
        block=config.environment,
        code_api_url=config.verifiers.code.api_url,
    )
