"""Bounds on a batch: how many trajectories are under way, and which ones it does not wait for."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer, prompts

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from verl.agent.stragglers import StragglerWatch
from verl.protocol import DataProto

TOKENIZER = byte_tokenizer()
CONFIG = GenerationConfig(
    max_turns=2,
    max_start_length=40,
    max_prompt_length=2000,
    max_response_length=300,
    max_obs_length=200,
    topk=2,
    search_delay_steps=0,
    straggler_factor=2.0,
)
QUICK = "<answer>y</answer>"
SLOW = "w" * 200 + QUICK


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def story(*turns_of_text: str):
    """A script that tells these turns, and goes on from where the prompt stops telling them."""

    def script(prompt: str, number: int) -> str:
        done = 0
        rest = prompt
        while done < len(turns_of_text) and turns_of_text[done] in rest:
            rest = rest.split(turns_of_text[done], 1)[1]
            done += 1
        turn = turns_of_text[done + number]
        told = max(length for length in range(len(turn)) if rest.endswith(turn[:length]))
        return turn if number else turn[told:]

    return script


class Batch:
    """Rows (uid, script) on one engine, with `meta_info` as the trainer gives it."""

    def __init__(self, rows, config=CONFIG, search=None, version=3, **engine):
        self.rows = rows
        self.config = config
        self.search = search or MemorySearch()
        names = [f"q{row} " for row in range(len(rows))]
        scripts = dict(zip(names, (script for _, script in rows), strict=True))

        def script(prompt, number):
            return next(script for name, script in scripts.items() if prompt.startswith(name))(
                prompt[3:], number
            )

        self.engine = ScriptedEngine(TOKENIZER, script, **engine)
        self.engine.version = version
        self.names = names

    def run(self, **meta_info) -> DataProto:
        gen_batch = prompts(TOKENIZER, self.names, **meta_info)
        gen_batch.non_tensor_batch["uid"] = np.array([uid for uid, _ in self.rows], dtype=object)
        manager = LLMGenerationManager(TOKENIZER, self.engine, self.search, self.config)
        output = manager.run_llm_loop(gen_batch)
        assert self.engine.sessions == {}, "a session was left open"
        return output


def reasons(output: DataProto) -> list[str]:
    return [record["finish_reason"] for record in output.non_tensor_batch["trajectory"]]


# ------------------------------------------------------------------------------- trajectories under way


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_no_more_trajectories_are_under_way_than_allowed_and_they_start_in_order(limit):
    most = 0

    class Counting(ScriptedEngine):
        def step(self):
            nonlocal most
            most = max(most, len(self.sessions))
            return super().step()

    engine = Counting(TOKENIZER, lambda prompt, number: ["<search>x</search>", "<answer>y</answer>"][number])
    config = replace(CONFIG, max_in_flight=limit, search_delay_steps=5)
    names = [f"q{row}" for row in range(10)]
    output = LLMGenerationManager(TOKENIZER, engine, MemorySearch(), config).run_llm_loop(
        prompts(TOKENIZER, names)
    )
    assert most == min(limit, 10)  # with those that search: their sessions are open
    assert [prompt for what, _, prompt in engine.calls if what == "open"] == names
    assert reasons(output) == ["answer"] * 10


# ------------------------------------------------------------------------------------- what is late


def watch(groups: str, factor: float = 2.0, started: int | None = None) -> StragglerWatch:
    watch = StragglerWatch(factor, groups)
    for row in range(len(groups) if started is None else started):
        watch.start(row, 0.0)
    return watch


def test_a_group_is_late_after_the_factor_times_the_median_once_half_of_the_batch_is_over():
    w = watch("aabb")
    w.end(0, 10.0)
    assert w.next_due() is None and w.late(1e9) == []
    w.end(2, 20.0)
    assert w.next_due() == 40.0  # 2 x the batch's median: the others take longer than 20
    assert w.late(40.0) == []
    assert w.late(40.1) == [[1], [3]]
    w.exclude_from_times([1])
    w.end(1, 41.0)  # without a say in the median
    assert w.next_due() == 40.0 and w.late(41.0) == [[3]]


# ------------------------------------------------------------------------------------------- cutting


ROWS = [("a", story(QUICK)), ("a", story(SLOW)), ("b", story(QUICK)), ("b", story(QUICK))]


def test_a_late_member_is_cut_masked_and_the_rest_is_as_without_it():
    batch = Batch(ROWS)
    output = batch.run()
    assert reasons(output) == ["answer", "cut", "answer", "answer"]
    assert batch.engine.num_steps == 2 * len(encode(QUICK))
    sampled = output.batch["response_mask"].sum(-1).tolist()
    assert sampled == [len(encode(QUICK)), 0, len(encode(QUICK)), len(encode(QUICK))]
    assert output.batch["rollout_log_probs"][1].abs().sum() == 0
    alone = Batch(ROWS, replace(CONFIG, straggler_factor=None)).run()
    for key in ("responses", "response_mask", "rollout_log_probs"):
        assert output.batch[key][[0, 2, 3]].equal(alone.batch[key][[0, 2, 3]]), key


def test_rule_11_validation_waits_for_everyone():
    assert reasons(Batch(ROWS).run(validate=True)) == ["answer"] * 4


def test_a_trajectory_whose_search_does_not_come_is_cut_and_its_search_cancelled():
    search = MemorySearch(held={"never"})
    rows = [*ROWS[2:], ("a", story(QUICK)), ("a", story("<search>never</search>", QUICK))]
    config = replace(CONFIG, search_delay_steps=None, straggler_factor=50.0)
    started = time.perf_counter()
    output = Batch(rows, config, search).run()
    assert reasons(output) == ["answer", "answer", "answer", "cut"]
    assert search.waiting("never").cancelled()
    assert time.perf_counter() - started < 5
    assert output.batch["response_mask"][3].sum() == 0
    assert output.non_tensor_batch["trajectory"][3]["turns"][0]["documents"] is None
