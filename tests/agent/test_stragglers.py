"""Bounds on a batch: how many trajectories are under way, and which ones it does not wait for."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer, prompts

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager, format_observation
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
    """Rows (uid, script) on one engine, with `meta_info` and `continuation` as the trainer gives them."""

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

    def run(self, continuation=None, **meta_info) -> DataProto:
        gen_batch = prompts(TOKENIZER, self.names, **meta_info)
        gen_batch.non_tensor_batch["uid"] = np.array([uid for uid, _ in self.rows], dtype=object)
        if continuation is not None:
            gen_batch.non_tensor_batch["continuation"] = np.array([*continuation, None], dtype=object)[:-1]
        manager = LLMGenerationManager(TOKENIZER, self.engine, self.search, self.config)
        output = manager.run_llm_loop(gen_batch)
        assert self.engine.sessions == {}, "a session was left open"
        return output


def reasons(output: DataProto) -> list[str]:
    return [record["finish_reason"] for record in output.non_tensor_batch["trajectory"]]


def state(output: DataProto, row: int) -> dict:
    """As the trainer makes it (`continuations` of verl/trainer/ppo/collection.py)."""
    width = output.batch["responses"].shape[1]
    length = int(output.batch["attention_mask"][row, -width:].sum())
    return {
        "response_ids": output.batch["responses"][row, :length].tolist(),
        "response_mask": output.batch["response_mask"][row, :length].tolist(),
        "log_probs": output.batch["rollout_log_probs"][row, :length].tolist(),
        "record": output.non_tensor_batch["trajectory"][row],
    }


def text(output: DataProto, row: int) -> str:
    return TOKENIZER.decode(state(output, row)["response_ids"])


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


# ------------------------------------------------------------------------------------------- keeping


def test_kept_trajectories_go_on_where_they_were():
    """The second step tells the end of the story: ids, mask and turns are those of an undisturbed run."""
    first = Batch(ROWS, version=3).run(keep_partial=True)
    assert reasons(first) == ["answer", "kept", "answer", "answer"]
    kept = first.non_tensor_batch["trajectory"][1]
    assert kept["turns"] == [] and kept["num_begun"] == 2 * len(encode(QUICK))
    assert (kept["version_first"], kept["version_last"]) == (3, 3)

    batch = Batch(ROWS, replace(CONFIG, straggler_factor=50.0), version=4)
    second = batch.run([state(first, 0), state(first, 1), None, None], keep_partial=True)
    assert reasons(second)[:2] == ["answer", "answer"]
    undisturbed = Batch(ROWS, replace(CONFIG, straggler_factor=None)).run()
    for key in ("responses", "response_mask", "attention_mask"):
        assert second.batch[key].equal(undisturbed.batch[key]), key
    record, other = (o.non_tensor_batch["trajectory"][1] for o in (second, undisturbed))
    assert record["turns"] == other["turns"]
    assert (record["version_first"], record["version_last"], record["num_begun"]) == (3, 4, 0)
    assert second.non_tensor_batch["trajectory"][0] == first.non_tensor_batch["trajectory"][0]
    assert second.batch["rollout_log_probs"][0].equal(first.batch["rollout_log_probs"][0])
    begun = kept["num_begun"]
    assert second.batch["rollout_log_probs"][1, :begun].equal(first.batch["rollout_log_probs"][1, :begun])
    assert "q0 " not in {prompt for what, _, prompt in batch.engine.calls if what == "open"}


def test_a_kept_turn_may_sample_what_is_left_of_its_limit_and_is_kept_once():
    first = Batch(ROWS).run(keep_partial=True)
    begun = first.non_tensor_batch["trajectory"][1]["num_begun"]
    batch = Batch(ROWS)
    second = batch.run([state(first, 0), state(first, 1), None, None], keep_partial=True)
    limits = [params.max_tokens for params in batch.engine.params]
    assert sorted(limits) == [CONFIG.max_response_length - begun] + [CONFIG.max_response_length] * 2
    assert reasons(second) == ["answer", "cut", "answer", "answer"]


def test_a_trajectory_kept_at_its_search_asks_again_and_goes_on():
    asks = story("<search>never</search>", QUICK)
    rows = [("a", story(QUICK)), ("a", asks), *ROWS[2:]]
    config = replace(CONFIG, search_delay_steps=None, straggler_factor=50.0)
    first = Batch(rows, config, MemorySearch(held={"never"})).run(keep_partial=True)
    assert reasons(first)[1] == "kept"
    search = MemorySearch()
    second = Batch(rows, replace(config, straggler_factor=None), search).run(
        [state(first, 0), state(first, 1), None, None]
    )
    assert search.posts == [["never"]]
    observation = format_observation(search.documents("never"))
    assert text(second, 1) == "<search>never</search>" + observation + QUICK
    record = second.non_tensor_batch["trajectory"][1]
    assert (record["finish_reason"], record["num_searches"]) == ("answer", 1)


@pytest.mark.parametrize("end", range(1, 8))
def test_a_stop_string_that_is_half_written_at_the_cut_still_ends_the_turn(end):
    """The next engine does not know the first half, so it is sampled again."""
    settled = "w" * 40 + "<search>x"
    long = settled + "</search>"
    factor = (len(encode(settled)) + end - 1.5) / (len(encode(QUICK)) - 1)
    rows = [("a", story(QUICK)), ("a", story(long, QUICK))]
    first = Batch(rows, replace(CONFIG, straggler_factor=factor)).run(keep_partial=True)
    assert reasons(first) == ["answer", "kept"] and text(first, 1) == settled
    second = Batch(rows, replace(CONFIG, straggler_factor=None)).run([state(first, 0), state(first, 1)])
    record = second.non_tensor_batch["trajectory"][1]
    assert [turn["action"] for turn in record["turns"]] == ["search", "answer"]
    assert record["turns"][0]["text"] == long
