"""The search environment: a turn's query becomes documents, an answer ends the episode.

    text -> parse_action -> Action("search", "who wrote X") -> search client -> format_observation
                            Action("answer", ..)            -> the end
                            no action                       -> HINT

Tags and the layout of an observation are Search-R1's, to the character: policies are trained on them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from search_r1.search.client import FoundDocument
from verl.agent.trajectory import Trajectory
from verl.environments.base import ActionUnderWay, BaseTextEnv, BaseTextEnvStepOutput, EpisodeFailed

SEARCH_END, ANSWER_END = "</search>", "</answer>"
INFORMATION_START, INFORMATION_END = "\n\n<information>", "</information>\n\n"

# Shown after a turn without an action. Without a tag in it: nobody can take it for an answer or a search.
HINT = (
    "\n\nThere was no action in this. To look something up, put a query between search tags; "
    "to finish, put the answer between answer tags.\n\n"
)

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """What a turn asks for. `content`: the query or the answer, stripped; "" for an invalid turn."""

    kind: Literal["search", "answer", "invalid"]
    content: str = ""


def parse_action(text: str, do_search: bool = True) -> Action:
    """The first complete search or answer in the policy's text of one turn.

    A search without a query is invalid: there is nothing to send. Without `do_search` only answers count.
    """
    for match in _ACTION.finditer(text):
        kind, content = match[1], match[2].strip()
        if kind == "answer":
            return Action("answer", content)
        if do_search:
            return Action("search", content) if content else Action("invalid")
    return Action("invalid")


def format_documents(documents: Sequence[FoundDocument]) -> str:
    """`Doc 1(Title: ...) text` per document, one a line; the title is the first line of `contents`."""
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()


def format_observation(documents: Sequence[FoundDocument]) -> str:
    """The text that is appended after a search."""
    return f"{INFORMATION_START}{format_documents(documents)}{INFORMATION_END}"


class SearchFailed(EpisodeFailed):
    """A search brought no documents."""

    reason: ClassVar[str] = "search_failed"


class SearchUnderWay(ActionUnderWay):
    """A query that was sent; ends in an observation with the documents, or in SearchFailed."""

    def __init__(self, query: str, documents: Future[list[FoundDocument]], started: float) -> None:
        """started: time.perf_counter()"""
        super().__init__("search", _details(query))
        self._documents, self._started = documents, started
        documents.add_done_callback(self._finish)

    def cancel(self) -> bool:
        return self._documents.cancel()

    def _finish(self, found: Future[list[FoundDocument]]) -> None:
        if found.cancelled():
            super().cancel()
        elif (error := found.exception()) is not None:
            self.set_exception(SearchFailed(str(error)))
        else:
            documents, seconds = found.result(), time.perf_counter() - self._started
            details = _details(self.metadata["query"], documents, seconds)
            self.set_result(_output("search", details, format_observation(documents)))


def _details(
    query: str | None = None, documents: list[FoundDocument] | None = None, seconds: float | None = None
) -> dict[str, Any]:
    """What a turn's record says of its search. documents: None if no search was made. seconds: from asking
    until they were there.
    """
    return {"query": query, "documents": documents, "search_seconds": seconds}


def _output(
    action: str, details: dict[str, Any], observation: str = "", finish_reason: str | None = None
) -> BaseTextEnvStepOutput:
    output: BaseTextEnvStepOutput = {
        "observations": [{"role": "user", "content": observation}] if observation else [],
        "reward": None,
        "done": finish_reason is not None,
        "metadata": details,
        "action": action,
    }
    if finish_reason is not None:
        output["finish_reason"] = finish_reason
    return output


class SearchEnvironment(BaseTextEnv):
    """Search-R1's episode: up to `max_turns` turns with a search or a hint, and one last turn, whose search
    is not made any more. The run's reward function scores it.

    env_config: `client` (a SearchClient), `topk`, `max_turns`, `do_search` (False: one turn, for an answer).
    """

    runs = "inline"  # the client has a thread of its own
    observation_end = INFORMATION_END
    counts_turns = True
    stateless = True

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.client, self.topk = env_config["client"], env_config["topk"]
        self.do_search = env_config["do_search"]
        self.max_turns = env_config["max_turns"] if self.do_search else 0
        if extras and self.do_search:
            self.max_turns = extras.get("max_turns", self.max_turns)
        self.stop = (SEARCH_END, ANSWER_END) if self.do_search else (ANSWER_END,)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        result = self.step_many([self], [action])[0]
        return result.result() if isinstance(result, Future) else result

    @classmethod
    def step_many(
        cls, envs: Sequence[Any], actions: Sequence[str]
    ) -> list[BaseTextEnvStepOutput | Future[BaseTextEnvStepOutput]]:
        """All searches go out together."""
        outputs: list[Any] = []
        asked: dict[int, str] = {}  # place -> query
        for place, (env, text) in enumerate(zip(envs, actions, strict=True)):
            action = parse_action(text, env.do_search)
            is_last = env.turns == env.max_turns
            env.turns += 1
            query = action.content if action.kind == "search" else None
            if action.kind == "answer":
                outputs.append(_output("answer", _details(), finish_reason="answer"))
            elif is_last:
                kind = "none" if query is None else "search"
                outputs.append(_output(kind, _details(query), finish_reason="max_turns"))
            elif query is None:
                outputs.append(_output("invalid", _details(), HINT))
            else:
                outputs.append(None)
                asked[place] = query
        if asked:
            started = time.perf_counter()
            futures = envs[0].client.submit(list(asked.values()), envs[0].topk)
            for (place, query), future in zip(asked.items(), futures, strict=True):
                outputs[place] = SearchUnderWay(query, future, started)
        return outputs


def env_metrics(trajectories: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Search-R1's `env/*` figures of a batch from its trajectory records, and how many searches failed.

    An action is one generation. Finished are those that answered. A search that the last turn still asked
    for counts as valid, though it was not made. All are means over trajectories but `env/search_failed`,
    a count. Raises ValueError for no trajectories.
    """
    if not trajectories:
        raise ValueError("env_metrics needs at least one trajectory")
    actions = np.array([record["num_actions"] for record in trajectories])
    valid = np.array([record["num_valid_actions"] for record in trajectories])
    searches = [sum(turn["action"] == "search" for turn in record["turns"]) for record in trajectories]
    reasons = [record["finish_reason"] for record in trajectories]
    return {
        "env/number_of_actions/mean": float(actions.mean()),
        "env/number_of_actions/max": float(actions.max()),
        "env/number_of_actions/min": float(actions.min()),
        "env/finish_ratio": float(np.mean([reason == "answer" for reason in reasons])),
        "env/number_of_valid_action": float(valid.mean()),
        "env/ratio_of_valid_action": float((valid / np.maximum(actions, 1)).mean()),
        "env/number_of_valid_search": float(np.mean(searches)),
        "env/search_failed": float(reasons.count("search_failed")),
    }


def search_metrics(
    before: Mapping[str, float], after: Mapping[str, float], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """`retrieval/*` of one batch from the search client's counters (`SearchClient.statistics`) around it.

    searches, and of these cache_hits and shared (an equal one was under way); requests (HTTP) that brought an
    answer, their mean seconds, failed_requests; failovers (searches answered by another server than was asked
    first). wait_seconds/*: from a trajectory's query to its documents. {} for a client without counters.
    """
    counts = {name: after[name] - before[name] for name in after}
    if not counts:
        return {}
    seconds = counts.pop("request_seconds")
    del counts["failed"]  # env/search_failed has it
    turns = [turn for t in trajectories for turn in t.turns[t.num_old_turns :]]
    seconds_waited = (turn.details.get("search_seconds") for turn in turns)
    waits = [value for value in seconds_waited if value is not None]
    metrics = counts | {
        "request_seconds/mean": seconds / max(1, counts["requests"]),
        "wait_seconds/mean": float(np.mean(waits)) if waits else 0.0,
        "wait_seconds/max": max(waits, default=0.0),
    }
    return {f"retrieval/{name}": float(value) for name, value in metrics.items()}
