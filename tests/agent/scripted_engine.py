"""What the agent's tests run on: a byte tokenizer, an engine that writes by a script, a search in memory.

The engine keeps the whole contract of `RolloutEngine` (slots, one token a step, stop strings, lengths), only
its tokens come from the script instead of a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search_r1.search.client import FoundDocument, SearchError
from verl.protocol import DataProto, object_array
from verl.sessions.engine_contract import Completion, Partial, SamplingParams

EOS = "<|end|>"


def byte_tokenizer(pad_token: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, but for `>` + newline and `<` + `/`, which are merged; `<|end|>` ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(">", "Ċ"), ("<", "/")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=pad_token)


Script = Callable[[str, int], str | list[int]]
"""(prompt, number of the turn from 0) -> what the policy writes: text, or exact token ids. Then comes eos."""


@dataclass
class _Session:
    prompt: str
    params: SamplingParams
    num_turns: int = 0
    to_write: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    version_first: int | None = None  # of the weights that wrote the first token of `written`
    state: str = "queued"  # queued | running | waiting


class ScriptedEngine:
    """`calls`: what the agent asked for, as ("open" | "resume" | "close", number of steps so far, prompt)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        script: Script,
        num_slots: int = 1000,
        max_model_len: int = 100_000,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.sessions: dict[int, _Session] = {}
        self.calls: list[tuple[str, int, str]] = []
        self.params: list[SamplingParams] = []  # of every turn, in the order they were asked for
        self.num_steps = self.num_generated = 0
        self.version = 0
        self._next_id = 100

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        assert len(token_ids) + params.max_tokens <= self.max_model_len
        session = _Session(self.tokenizer.decode(token_ids), params, context=list(token_ids))
        self._next_id += 1
        self.sessions[self._next_id] = session
        self._note("open", session)
        self._begin(session)
        session.state = "queued"
        return self._next_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        session = self.sessions[session_id]
        assert session.state == "waiting"
        session.context += token_ids
        assert len(session.context) + params.max_tokens <= self.max_model_len
        session.params = params
        self._note("resume", session)
        self._begin(session)

    def close(self, session_id: int) -> None:
        self._note("close", self.sessions.pop(session_id))

    @property
    def has_runnable(self) -> bool:
        states = [session.state for session in self.sessions.values()]
        free = self.num_slots - states.count("running") - states.count("waiting")
        return "running" in states or ("queued" in states and free > 0)

    def step(self) -> list[Completion]:
        assert self.has_runnable, "step was called with nothing to do"
        self.num_steps += 1
        free = self.num_slots - sum(session.state != "queued" for session in self.sessions.values())
        for session in self.sessions.values():
            if session.state == "queued" and free > 0:
                session.state = "running"
                free -= 1
        ended = []
        for session_id, session in self.sessions.items():
            if session.state == "running" and (completion := self._write(session_id, session)):
                ended.append(completion)
        return ended[::-1]  # the order is not promised

    def partial(self, session_id: int) -> Partial:
        session = self.sessions[session_id]
        written = list(session.written) if session.state == "running" else []
        return Partial(written, _log_probs(len(written)), session.version_first if written else None)

    def load_weights(self, weights: object, version: int) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        states = [session.state for session in self.sessions.values()]
        return {
            "running": float(states.count("running")),
            "queued": float(states.count("queued")),
            "parked": float(states.count("waiting")),
            "steps": float(self.num_steps),
            "generated_tokens": float(self.num_generated),
            "seconds": 0.5 * self.num_steps,
        }

    def _note(self, what: str, session: _Session) -> None:
        self.calls.append((what, self.num_steps, session.prompt))

    def _begin(self, session: _Session) -> None:
        self.params.append(session.params)
        said = self.script(session.prompt, session.num_turns)
        ids = self.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else list(said)
        session.to_write = [*ids, self.tokenizer.eos_token_id]
        session.written = []
        session.state = "running"
        session.num_turns += 1

    def _write(self, session_id: int, session: _Session) -> Completion | None:
        token = session.to_write.pop(0)
        params = session.params
        if not session.written:
            session.version_first = self.version
        session.written.append(token)
        self.num_generated += 1
        session.context.append(token)
        stop_string = params.stop.match(session.written) if params.stop else None
        if stop_string is not None:
            reason = "stop"
        elif token in params.eos_token_ids and not params.ignore_eos:
            reason = "eos"
        elif len(session.written) >= params.max_tokens:
            reason = "length"
        else:
            return None
        session.state = "waiting"
        log_probs = _log_probs(len(session.written))
        versions = (session.version_first, self.version)
        return Completion(
            session_id, list(session.written), log_probs, log_probs, reason, stop_string, *versions
        )


def _log_probs(num_tokens: int) -> list[float]:
    return [-0.1 * (position + 1) for position in range(num_tokens)]


class MemorySearch:
    """The part of SearchClient that the agent uses: answers at once, or when the test says so.

    `posts` holds the queries of each `submit`. Queries in `held` wait for `release`; "fail..." fails.
    """

    def __init__(self, held: set[str] | None = None, text: str = "about") -> None:
        self.posts: list[list[str]] = []
        self.topk: int | None = None
        self.held = held or set()
        self.text = text
        self._waiting: dict[str, Future[list[FoundDocument]]] = {}

    def submit(self, queries: Sequence[str], topk: int | None = None) -> list[Future[list[FoundDocument]]]:
        self.posts.append(list(queries))
        self.topk = topk
        futures = []
        for query in queries:
            future: Future[list[FoundDocument]] = Future()
            futures.append(future)
            if query in self.held:
                self._waiting[query] = future
            else:
                self._answer(query, future)
        return futures

    def statistics(self) -> dict[str, float]:
        return {}

    def waiting(self, query: str) -> Future[list[FoundDocument]]:
        """The Future of a held query that was asked."""
        return self._waiting[query]

    def release(self, query: str) -> None:
        """Answers a held query; waits until it has been asked."""
        deadline = time.monotonic() + 10
        while query not in self._waiting:
            assert time.monotonic() < deadline, f"{query!r} was never asked"
            time.sleep(0.002)
        self._answer(query, self._waiting.pop(query))

    def documents(self, query: str) -> list[FoundDocument]:
        return [{"contents": f'"{query}"\n{self.text} {query}.', "score": 2.0}]

    def _answer(self, query: str, future: Future[list[FoundDocument]]) -> None:
        if query.startswith("fail"):
            future.set_exception(SearchError("no answer within 60 s (it is dead)"))
        else:
            future.set_result(self.documents(query))


def prompts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], **meta_info: object) -> DataProto:
    """A gen_batch of these prompts; the seed of row i is 1000 + i."""
    return DataProto.from_dict(
        tensors={"sampling_seeds": torch.arange(len(texts)) + 1000},
        non_tensors={
            "raw_prompt_ids": object_array([tokenizer.encode(t, add_special_tokens=False) for t in texts]),
            "uid": np.array([f"uid-{i}" for i in range(len(texts))], dtype=object),
        },
        meta_info=dict(meta_info),
    )
