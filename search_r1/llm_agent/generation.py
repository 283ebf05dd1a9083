"""The agent loop with a search engine, under Search-R1's names, and the search environment.

    text -> parse_action -> ("search", "who wrote X") -> search client -> format_observation
                            ("answer", ..)            -> the end
                            no action                 -> HINT

Tags and the layout of an observation are Search-R1's, to the character, because policies are trained on them.
The loop itself is in `verl/agent/`.
"""

import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_r1.llm_agent.other_passages import ShuffledSearch, submit_shuffled
from search_r1.search.client import API_KEY_VARIABLE, FoundDocument, SearchClient
from verl.agent.agent import EnvironmentAgent
from verl.agent.loop import LoopEvent
from verl.agent.trajectory import AgentConfig, Trajectory, generation_eos_ids
from verl.config import Config
from verl.config.environments import EnvironmentConfig
from verl.config.mixture import SHUFFLED
from verl.environments.environment import ActionUnderWay, BaseTextEnv, BaseTextEnvStepOutput, EpisodeFailed
from verl.environments.executors import Environments
from verl.environments.registry import SEARCH
from verl.sessions.engine_contract import RolloutEngine

INFORMATION_END = "</information>\n\n"
# Shown after a turn without an action. It contains no tag, so nobody can take it for an answer or a search.
HINT = (
    "\n\nThere was no action in this. To look something up, put a query between search tags; "
    "to finish, put the answer between answer tags.\n\n"
)

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def parse_action(text: str, do_search: bool = True) -> tuple[str, str]:
    """Return the first complete action in the policy's text of one turn.

    Args:
        text: What the policy wrote in the turn.
        do_search: If False, only answers count.

    Returns:
        ("search", query) or ("answer", answer). It is ("invalid", "") if there is no action, and also for a
        search without a query.
    """
    for match in _ACTION.finditer(text):
        kind = match[1]
        content = match[2].strip()
        if kind == "answer" or (do_search and content):
            return kind, content
        if do_search:
            break
    return "invalid", ""


def format_documents(documents: Sequence[FoundDocument]) -> str:
    """Return the documents as text, one line `Doc 1(Title: ...) text` per document.

    The title is the first line of `contents`.
    """
    splits = [document["contents"].partition("\n") for document in documents]
    lines = [f"Doc {number}(Title: {title}) {text}\n" for number, (title, _, text) in enumerate(splits, 1)]
    return "".join(lines).strip()


def format_observation(documents: Sequence[FoundDocument]) -> str:
    """Return the text that is appended after a search."""
    return f"\n\n<information>{format_documents(documents)}{INFORMATION_END}"


def _under_way(query: str, documents: Future[list[FoundDocument]]) -> ActionUnderWay:
    """Return the action of a query that was sent just now.

    It comes to an observation with the documents, or to EpisodeFailed.
    """
    started = time.perf_counter()
    finished = list[float]()
    documents.add_done_callback(lambda _: finished.append(time.perf_counter()))

    def output(done: Future[list[FoundDocument]]) -> BaseTextEnvStepOutput:
        if (error := done.exception()) is not None:
            failure = EpisodeFailed(str(error))
            failure.reason = "search_failed"
            raise failure
        # A thread that waits for a future may go on before the future's callbacks are called.
        seconds = (finished or [time.perf_counter()])[0] - started
        text = format_observation(done.result())
        return _output("search", query, text, documents=done.result(), search_seconds=seconds)

    return ActionUnderWay("search", _output("search", query)["metadata"], documents, output)


def _output(
    action: str, query: str | None = None, observation: str = "", finish_reason: str = "", **details: Any
) -> BaseTextEnvStepOutput:
    """Return the output of a step.

    `details` are those of a search that was made: its `documents`, and `search_seconds`, the time until they
    arrived.
    """
    return {
        "observations": [{"role": "user", "content": observation}] if observation else [],
        "reward": None,
        "done": bool(finish_reason),
        "metadata": {"query": query, "documents": None, "search_seconds": None, **details},
        "action": action,
        "finish_reason": finish_reason,
    }


class SearchEnvironment(BaseTextEnv):
    """The episode of Search-R1: up to `max_turns` turns with a search or a hint, and one last turn.

    A search in the last turn is not made any more. The run's reward function scores the episode.

    Args:
        env_config: `client` (a SearchClient), `topk` and `do_search` (False: one turn, for an answer).
        extras: `retriever` says that the row's searches find something other than what the server answers
            (`verl/data/controls.py`).
    """

    runs = "inline"  # the client has a thread of its own
    stop: tuple[str, ...] = ("</search>", "</answer>")
    observation_end = INFORMATION_END
    counts_turns = stateless = True

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.client, self.topk, self.do_search = (env_config[key] for key in ("client", "topk", "do_search"))
        self.control: Mapping[str, Any] | None = (extras or {}).get("retriever")
        if not self.do_search:
            self.max_turns = 0
            self.stop = self.stop[1:]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        result = self.step_many([self], [action])[0]
        return result.output(result.future) if isinstance(result, ActionUnderWay) else result

    @classmethod
    def step_many(
        cls, envs: Sequence[Any], actions: Sequence[str]
    ) -> list[BaseTextEnvStepOutput | ActionUnderWay]:
        """Take one step in each of several episodes. Their searches all go out together."""
        outputs: list[Any] = []
        queries: dict[int, str] = {}  # index of an episode -> its query
        for index, (env, text) in enumerate(zip(envs, actions, strict=True)):
            kind, query = parse_action(text, env.do_search)
            is_last = env.turns == env.max_turns
            env.turns += 1
            if kind == "answer":
                outputs.append(_output("answer", finish_reason="answer"))
            elif is_last:
                name = "none" if kind == "invalid" else kind
                outputs.append(_output(name, query or None, finish_reason="max_turns"))
            elif kind == "invalid":
                outputs.append(_output("invalid", observation=HINT))
            else:
                outputs.append(None)
                queries[index] = query
        for index, future in cls._submit(envs, queries).items():
            outputs[index] = _under_way(queries[index], future)
        return outputs

    @classmethod
    def _submit(
        cls, envs: Sequence[Any], queries: Mapping[int, str]
    ) -> dict[int, Future[list[FoundDocument]]]:
        """Start the searches of some of these episodes, whose turns are counted already.

        Args:
            queries: Maps the index of an episode in `envs` to its query.

        Returns:
            Maps the same index to a future of the documents. These are the server's, or those that the row's
            control prescribes.
        """
        plain: dict[int, str] = {}
        shuffled: dict[int, ShuffledSearch] = {}
        futures: dict[int, Future[list[FoundDocument]]] = {}
        for index, query in queries.items():
            env = envs[index]
            if env.control is None:
                plain[index] = query
            elif env.control["kind"] == SHUFFLED:
                shuffled[index] = ShuffledSearch(query, env.control, env.turns - 1)
            else:
                futures[index] = Future()
                futures[index].set_result([])
        if plain:
            results = envs[0].client.submit(list(plain.values()), envs[0].topk)
            futures.update(zip(plain, results, strict=True))
        if shuffled:
            results = submit_shuffled(envs[0].client, list(shuffled.values()), envs[0].topk)
            futures.update(zip(shuffled, results, strict=True))
        return futures


def env_metrics(trajectories: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return Search-R1's `env/*` metrics of a batch, computed from its trajectory records.

    An action is one generation. A trajectory is finished if it answered. A search that the last turn asked
    for counts as valid, though it was not made. `env/search_failed` counts the trajectories whose search
    failed. All other metrics are taken over trajectories.
    """
    actions = np.array([record["num_actions"] for record in trajectories])
    valid = np.array([record["num_valid_actions"] for record in trajectories])
    searches = [sum(turn["action"] == "search" for turn in record["turns"]) for record in trajectories]
    reasons = [record["finish_reason"] for record in trajectories]
    figures = {
        "number_of_actions/mean": actions.mean(),
        "number_of_actions/max": actions.max(),
        "number_of_actions/min": actions.min(),
        "finish_ratio": reasons.count("answer") / len(reasons),
        "number_of_valid_action": valid.mean(),
        "ratio_of_valid_action": (valid / np.maximum(actions, 1)).mean(),
        "number_of_valid_search": np.mean(searches),
        "search_failed": reasons.count("search_failed"),
    }
    return {f"env/{name}": float(value) for name, value in figures.items()}


@dataclass(frozen=True)
class GenerationConfig(AgentConfig):
    """The configuration of trajectories with searches."""

    # Search-R1 passes it. Nothing reads it, because a batch need not be a multiple of it.
    num_gpus: int | None = None
    no_think_rl: bool = False
    search_url: str | None = None  # the server of a manager that gets no search client
    topk: int = 3
    do_search: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk < 1:
            raise ValueError(f"topk: found {self.topk}, expected 1 or more")
        if self.no_think_rl:
            raise ValueError("no_think_rl: found true, expected false: only what was sampled is trained")


class LLMGenerationManager(EnvironmentAgent):
    """An agent that searches, with a search client that it owns."""

    config: GenerationConfig

    def __init__(
        self,
        tokenizer: Any,
        engine: RolloutEngine,
        search_client: SearchClient | None,
        config: GenerationConfig,
        on_event: Callable[[LoopEvent], None] | None = None,
        block: EnvironmentConfig | None = None,
        code_api_url: str | None = None,
    ) -> None:
        """Create the agent.

        Args:
            tokenizer: The tokenizer of the policy.
            engine: The engine that generates.
            search_client: If None, a client is made for `config.search_url`. None is needed without
                `do_search`.
            config: How trajectories are made.
            on_event: Is called with what happens as it happens. It needs an engine with `partial`.
            block: The run's `environment` block, for rows with other environments.
            code_api_url: The address of the code server of these environments (`CodeClient`).

        Raises:
            ValueError: For lengths that can't work, and for `do_search` without a client and an address.
        """
        if config.do_search and search_client is None:
            if config.search_url is None:
                raise ValueError("do_search: found true without a search client; expected one, or search_url")
            search_client = SearchClient(config.search_url, topk=config.topk)
        self.search_client = search_client
        search = {"client": search_client, "topk": config.topk, "do_search": config.do_search}
        run_code = dict.fromkeys(("lcb", "searchcode"), {"code_api_url": code_api_url})
        environments = Environments(block, {SEARCH: search, **run_code})
        super().__init__(tokenizer, engine, config, environments, on_event)
        self._counts: dict[str, float] = {}  # the search client's counters at the end of the last batch
        empty = len(self.codec.encode(format_observation([])))
        if config.do_search and config.max_obs_length < empty:
            raise ValueError(
                f"max_obs_length: found {config.max_obs_length}, expected {empty} or more, as the tags need"
            )

    def figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the `retrieval/*` metrics since the last batch, from the search client's counters.

        Returns:
            {} if there is no search client, else

            - `searches`, and of these `cache_hits` and `shared` (an equal search was under way),
            - `requests`: HTTP requests that brought an answer, and `request_seconds/mean`: their mean
              seconds,
            - `failed_requests`,
            - `failovers`: searches that another server answered than was asked first,
            - `wait_seconds/mean` and `wait_seconds/max`: seconds from a trajectory's query to its documents.
        """
        client = self.search_client
        old_counts = self._counts
        self._counts = {} if client is None else client.statistics()
        metrics: dict[str, Any] = {name: n - old_counts.get(name, 0.0) for name, n in self._counts.items()}
        if metrics:
            turns = [turn for t in trajectories for turn in t.turns[t.num_old_turns :]]
            waits = [x for turn in turns if (x := turn.details.get("search_seconds")) is not None]
            metrics["request_seconds/mean"] = metrics.pop("request_seconds") / max(1, metrics["requests"])
            metrics |= {"wait_seconds/mean": np.mean(waits or 0.0), "wait_seconds/max": max(waits, default=0)}
            del metrics["failed"]  # `env/search_failed` reports it
        return {f"retrieval/{name}": float(value) for name, value in metrics.items()}

    def close(self) -> None:
        super().close()
        if self.search_client is not None:
            self.search_client.close()


def build_agent(
    config: Config, tokenizer: Any, engine: RolloutEngine, *, api_key: str | None = None
) -> LLMGenerationManager:
    """Return the agent of a training run, built from the run's whole configuration.

    `api_key` is the key of the retrieval servers. Raises ValueError for an address or a proxy that can't be
    used.
    """
    data = config.data
    rollout = config.actor_rollout_ref.rollout
    retriever = config.retriever
    lengths = ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length")
    pace = ("search_delay_steps", "max_in_flight", "straggler_factor")
    sampling = ("temperature", "top_p", "top_k", "min_p")
    generation = GenerationConfig(
        max_turns=config.max_turns,
        topk=retriever.topk,
        do_search=config.do_search,
        eos_token_ids=generation_eos_ids(config.actor_rollout_ref.model.path),
        **{name: data[name] for name in lengths},
        **{name: rollout[name] for name in (*pace, *sampling)},
    )
    client = None
    client_arguments = (retriever.url, retriever.topk, retriever.timeout)
    if config.do_search:
        client = SearchClient(*client_arguments, api_key=api_key, use_proxy=retriever.use_proxy)
    url = config.verifiers.code.api_url
    return LLMGenerationManager(tokenizer, engine, client, generation, None, config.environment, url)


def agent_factory(config: Config) -> Callable[[Any, RolloutEngine], LLMGenerationManager]:
    """Return `build_agent` for a configuration, with the key of the retrieval servers of this process.

    It can be sent to processes on other machines, where the variable SEARCH_R1_API_KEY is not set.
    """
    return functools.partial(build_agent, config, api_key=os.environ.get(API_KEY_VARIABLE, ""))
