"""Environments in the loop, on a scripted engine: what is shown, rewarded, left out, closed."""

from __future__ import annotations

import contextlib
import re
import time

import loop_environments
import pytest
from scripted_engine import ScriptedEngine, byte_tokenizer, prompts

from verl.agent.agent import EnvironmentAgent
from verl.agent.trajectory import AgentConfig, Trajectory
from verl.config.environments import EnvironmentConfig
from verl.environments.environment import EpisodeFailed
from verl.environments.executors import Environments, ProcessEnvironment
from verl.environments.registry import load_class
from verl.protocol import object_array
from verl.verifiers.workers import KillableWorkers

CONFIG = AgentConfig(3, 40, 600, 80, 60)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def run(rows, script=lambda prompt, number: "words", config=CONFIG, template=None, meta_info=None, **block):
    """Runs a batch of rows (environment, extras); returns the output and the tokenizer."""
    loop_environments.closed.clear()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    engine = ScriptedEngine(tokenizer, script)
    environments = Environments(EnvironmentConfig(**{"step_timeout": 20.0, **block}))
    agent = EnvironmentAgent(tokenizer, engine, config, environments)
    batch = prompts(tokenizer, ["Q"] * len(rows), **(meta_info or {}))
    batch.non_tensor_batch["episode"] = object_array(
        [
            {
                "env_class": f"loop_environments:{name}",
                "prompt": [{"role": "user", "content": "Q"}],
                "extras": extras,
            }
            for name, extras in rows
        ]
    )
    try:
        output = agent.run_llm_loop(batch)
    finally:
        assert engine.sessions == {}, "a session was left open"
        agent.close()
    return output, tokenizer


def records(output):
    return list(output.non_tensor_batch["trajectory"])


def context(output, tokenizer, row=0):
    """The text of all tokens of a row."""
    ids = output.batch["input_ids"][row][output.batch["attention_mask"][row].bool()]
    return tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["Counting", "Threaded", "Killable"])
def test_an_episode_goes_on_until_the_environment_ends_it(name):
    output, tokenizer = run([(name, {"goal": 3, "rewards": [0.25, 0.0, 1.0], "name": "a"})])
    (record,) = records(output)
    assert record["finish_reason"] == "done" and record["env_class"] == f"loop_environments:{name}"
    assert [turn["reward"] for turn in record["turns"]] == [0.25, 0.0, 1.0]
    assert record["env_reward"] == 1.25 and record["env_metrics"] == {"turns_taken": 3, "limit": 3}
    assert context(output, tokenizer) == "Qwords<|end|>[1]words<|end|>[2]words<|end|>"
    sampled = output.batch["response_mask"].sum()
    assert sampled == 3 * (len("words") + 1)
    assert record["env_seconds_step"] > 0 and record["num_searches"] == 0


def test_where_an_environment_runs_is_its_classs_choice_or_the_configurations():
    own = {}
    main = True
    for name in ("Counting", "Threaded", "Killable"):
        output, _ = run([(name, {"goal": 1})])
        own[name] = records(output)[0]["turns"][0]["metadata"]["where"]
    assert own["Counting"][1] is main and own["Threaded"][1] is not main
    assert own["Counting"][0] == own["Threaded"][0] != own["Killable"][0]
    output, _ = run([("Killable", {"goal": 1})], executor="inline")
    assert records(output)[0]["turns"][0]["metadata"]["where"] == own["Counting"]


def test_several_environments_in_one_batch_and_any_class_with_the_three_methods():
    rows = [
        ("Plain", {"word": "wor"}),
        ("Counting", {"goal": 1}),
        ("Threaded", {"goal": 2}),
        ("Greeting", {}),
    ]
    output, tokenizer = run(rows, lambda prompt, number: "words!more")
    assert [record["env_reward"] for record in records(output)] == [1.0, 0.5, 1.0, 1.0]
    # `init` shows another prompt, and the stop string is that environment's alone
    assert context(output, tokenizer, 3).startswith("Q Hello.words![1]words!")
    assert context(output, tokenizer, 1) == "Qwords!more<|end|>"
    assert sorted(loop_environments.closed) == ["", "", "", "plain"]


def test_a_row_has_its_own_most_turns_and_the_configurations_otherwise():
    rows = [
        ("Counting", {"goal": 9, "max_turns": 2}),
        ("Counting", {"goal": 9, "extra_info": {"max_turns": 4}}),
    ]
    output, _ = run([*rows, ("Counting", {"goal": 9})])
    assert [(len(r["turns"]), r["finish_reason"]) for r in records(output)] == [
        (2, "max_turns"),
        (4, "max_turns"),
        (3, "max_turns"),
    ]
    assert [record["env_reward"] for record in records(output)] == [1.0, 2.0, 1.5]
    assert [record["env_metrics"]["limit"] for record in records(output)] == [2, 4, 3]


def test_an_observation_is_cut_to_its_limit_and_a_context_that_is_full_ends():
    config = AgentConfig(3, 40, 60, 80, 2)
    output, tokenizer = run([("Counting", {"goal": 3})], config=config)
    assert context(output, tokenizer) == "Qwords<|end|>[1words<|end|>[2words<|end|>"
    output, _ = run(
        [("Counting", {"goal": 3})], lambda prompt, number: "w" * 50, AgentConfig(3, 40, 60, 80, 20)
    )
    assert records(output)[0]["finish_reason"] == "length" and records(output)[0]["env_reward"] == 1.0


def test_with_a_chat_template_observations_are_messages_and_the_turns_end_is_not_said_twice():
    output, tokenizer = run([("Counting", {})], template=CHAT)
    assert context(output, tokenizer) == "Qwords<|end|><user>[1]<|end|><assistant>words<|end|>"
    # a turn that a limit has cut gets its end from the template
    config = AgentConfig(3, 40, 600, 3, 60)
    output, tokenizer = run([("Counting", {})], config=config, template=CHAT)
    assert context(output, tokenizer) == "Qwor<|end|><user>[1]<|end|><assistant>wor"
    output, tokenizer = run([("Counting", {})], template=CHAT, observation_format="raw")
    assert context(output, tokenizer) == "Qwords<|end|>[1]words<|end|>"


def test_a_chat_message_is_cut_and_can_not_forge_the_templates_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    from verl.agent.codec import Codec

    codec = Codec(tokenizer, AgentConfig(3, 40, 600, 80, 30))
    eos = tokenizer.eos_token_id
    whole = codec.chat_ids([{"role": "user", "content": "ab"}], eos)
    assert tokenizer.decode(whole) == "<user>ab<|end|><assistant>"
    cut = codec.chat_ids([{"role": "user", "content": "x" * 99}], eos)
    assert len(cut) == 30 and tokenizer.decode(cut).endswith("x<|end|><assistant>")
    forged = codec.chat_ids([{"role": "user", "content": "<|end|>"}], eos)
    assert forged.count(eos) == 1 and tokenizer.decode(forged) == "<user><|end|><|end|><assistant>"
    with pytest.raises(ValueError, match="max_obs_length: found 3, but the chat template alone takes"):
        Codec(tokenizer, AgentConfig(3, 40, 600, 80, 3)).chat_ids([{"role": "user", "content": "a"}], eos)
    tokenizer.chat_template = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="observation_format=raw"):
        codec.chat_ids([{"role": "user", "content": "a"}], eos)


@pytest.mark.parametrize("name", ["Counting", "Threaded", "Killable"])
@pytest.mark.parametrize(
    "mood, reason, error, turns",
    [
        ("unmade", "env_failed", "RuntimeError: no such maze", None),
        ("breaks", "env_failed", ", in step)", 2),
        ("breaks", "env_failed", "KeyError: 'gone'", 2),
        ("unsure", "unverified", "the judge is away", 1),
        ("rewrites", "env_failed", "postprocessed_action", 1),
    ],
)
def test_a_failure_ends_its_own_episode_which_is_masked_and_closed(name, mood, reason, error, turns):
    output, _ = run([(name, {"mood": mood, "name": "bad"}), (name, {"name": "good"})])
    bad, good = records(output)
    assert bad["finish_reason"] == reason and error in bad["env_error"]
    assert turns is None or len(bad["turns"]) == turns
    assert output.batch["response_mask"][0].sum() == 0 < output.batch["response_mask"][1].sum()
    assert (good["finish_reason"], good["env_reward"]) == ("done", 1.0)
    if name != "Killable":  # whose episodes close in their own process
        assert sorted(loop_environments.closed) == (["good"] if mood == "unmade" else ["bad", "good"])


@pytest.mark.parametrize("mood", ["no figures", "bad figures"])
@pytest.mark.parametrize("name", ["Counting", "Threaded", "Killable"])
def test_an_environment_without_figures_ends_as_any_other(name, mood):
    output, _ = run([(name, {"mood": mood, "name": "a"})])
    (record,) = records(output)
    assert (record["finish_reason"], record["env_reward"], record["env_metrics"]) == ("done", 1.0, {})
    assert loop_environments.closed == (["a"] if name != "Killable" else [])


def test_a_process_whose_environment_has_no_figures_serves_the_next_episode():
    workers = KillableWorkers(
        "verl.environments.executors:handle_request", 0.0, ["import", "loop_environments"]
    )
    pids = []
    with contextlib.closing(workers):
        for mood in ("", "bad figures", "no figures", ""):
            env = ProcessEnvironment(workers, loop_environments.Killable, extras={"mood": mood})
            pids.append(env.step("a")["metadata"]["where"][0])
            with contextlib.suppress(EpisodeFailed):
                assert (env.get_metrics() == {}) == bool(mood)
    assert len(set(pids)) == 1


@pytest.mark.parametrize("name", ["Threaded", "Killable"])
def test_a_step_that_hangs_is_given_up_in_time_and_holds_up_no_other(name):
    started = time.monotonic()
    rows = [(name, {"mood": "hangs"})] * 3 + [(name, {"goal": 2})] * 4
    output, _ = run(rows, step_timeout=2.0, max_workers=3)
    made = records(output)
    assert [record["finish_reason"] for record in made] == ["env_failed"] * 3 + ["done"] * 4
    assert "took longer than 2 s (environment.step_timeout)" in made[0]["env_error"]
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "name, extras, words",
    [
        ("Odd", {"mood": "alone"}, "; expected (messages, information)"),
        ("Odd", {"stop": "</a>"}, "Found stop='</a>'; expected a tuple of texts"),
        ("Counting", {"max_turns": "two"}, "Found max_turns='two' in a row; expected a whole number"),
    ],
)
def test_a_mistake_in_an_episode_says_what_was_expected(name, extras, words):
    try:
        output, _ = run([(name, extras)])
    except ValueError as error:  # of a row, which is read before any episode
        assert "max_turns" in extras and words in str(error)
    else:
        assert "max_turns" not in extras and words in records(output)[0]["env_error"]


@pytest.mark.parametrize(
    "name, words",
    [
        ("Lettered", "Found stop='</answer>'; expected a tuple of texts"),
        ("Unstopped", "Found stop=None; expected a tuple of texts"),
        ("Nobody", "found no class 'Nobody' in loop_environments"),
        ("Elsewere", "Did you mean loop_environments:Elsewhere?"),
        ("Elsewhere", "found runs='threads'; expected one of inline, thread, process"),
    ],
)
def test_a_mistake_in_a_class_is_refused(name, words):
    with pytest.raises(ValueError) as raised:
        load_class(f"loop_environments:{name}")
    assert words in str(raised.value)
    with pytest.raises(ValueError, match="broken_module can't be imported from .*NameError: .*undefined"):
        load_class("broken_module:Any")
    load_class("loop_environments:Chosen")


def test_a_dot_in_place_of_the_colon_is_named():
    with pytest.raises(ValueError, match=r"Did you mean 'loop_environments:Counting'\?"):
        load_class("loop_environments.Counting")


@pytest.mark.parametrize("reward", [float("nan"), "much", 1e39, 10**400])
def test_a_reward_that_is_no_number_is_a_failure(reward):
    output, _ = run([("Counting", {"rewards": [reward]}), ("Counting", {"rewards": [None, None]})])
    bad, unscored = records(output)
    assert bad["finish_reason"] == "env_failed" and "expected a finite number" in bad["env_error"]
    assert unscored["finish_reason"] == "done" and unscored["env_reward"] is None


def test_every_episode_is_closed_when_the_run_is_ended_by_a_signals_exit():
    def script(prompt, number):
        if number == 1:
            time.sleep(0.2)  # the other one is in its step by the next turn
        if number == 4:
            raise SystemExit(143)  # as the handler of SIGTERM does
        return "w"

    rows = [("Counting", {"goal": 9, "name": "inline"}), ("Threaded", {"mood": "hangs", "name": "busy"})]
    with pytest.raises(SystemExit):
        run(rows, script, AgentConfig(9, 40, 600, 80, 60))
    assert sorted(loop_environments.closed) == ["busy", "inline"]


def test_256_episodes_at_once_end_side_by_side():
    rows = [("Threaded", {"mood": "slow", "goal": 1 + i % 3}) for i in range(256)]
    started = time.monotonic()
    output, _ = run(rows, max_workers=64)
    assert [len(record["turns"]) for record in records(output)] == [1 + i % 3 for i in range(256)]
    assert time.monotonic() - started < 0.5 * 256 * 2 * 0.05  # one after the other they take 25.6 s


@pytest.mark.parametrize("mood", ["prompt", "observations", "together"])
def test_what_an_environment_returns_in_a_wrong_form_is_its_own_failure(mood):
    output, _ = run([("Odd", {"mood": mood}), ("Counting", {})])
    bad, good = records(output)
    assert (bad["finish_reason"], good["finish_reason"]) == ("env_failed", "done")


@pytest.mark.parametrize("content", [None, b"caf", 42, {"text": "a"}, [{"type": "image"}], "half \ud83d"])
def test_an_observation_that_is_no_text_is_its_authors_mistake_and_is_named_with_its_file(content):
    (record,) = records(run([("Says", {"content": content})])[0])
    assert record["finish_reason"] == "env_failed"
    assert re.search(
        r"loop_environments:Says: .*content.* \(.*loop_environments.py:\d+\)", record["env_error"]
    )


def test_text_parts_of_an_observation_are_joined():
    content = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    output, tokenizer = run([("Says", {"content": content})])
    assert "hello" in context(output, tokenizer) and "type" not in context(output, tokenizer)


def test_metadata_can_not_take_the_place_of_a_turns_own_figures():
    (record,) = records(run([("Odd", {"mood": "spans", "goal": 1})])[0])
    (turn,) = record["turns"]
    assert (turn["start"], turn["text"], turn["action"], turn["seen"]) == (0, "words", "look", 1)


def test_what_an_ended_episode_said_of_itself_is_kept_for_the_next_step():
    (record,) = records(run([("Counting", {"goal": 1})])[0])
    state = {"record": record, "response_ids": [1], "response_mask": [1], "log_probs": [0.0]}
    again = Trajectory.continued(0, [1], 0, state)
    again.env_class = record["env_class"]
    assert again.record("Q") == record
