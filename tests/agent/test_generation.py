"""The agent loop on a scripted engine: what is appended, masked, asked, bounded, and in which order."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer, prompts

from search_r1.llm_agent.generation import (
    HINT,
    INFORMATION_END,
    GenerationConfig,
    LLMGenerationManager,
    build_agent,
    format_observation,
)
from verl.agent.loop import LoopEvent
from verl.config import load_config
from verl.protocol import DataProto

TOKENIZER = byte_tokenizer()
CONFIG = GenerationConfig(
    max_turns=2,
    max_start_length=40,
    max_prompt_length=600,
    max_response_length=80,
    max_obs_length=200,
    topk=2,
)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(script, texts=("Q",), config=CONFIG, search=None, meta_info=None, on_event=None, **engine):
    """Runs one batch; returns the output, the engine and the search."""
    search = search or MemorySearch()
    engine = ScriptedEngine(TOKENIZER, script, **engine)
    manager = LLMGenerationManager(TOKENIZER, engine, search, config, on_event)
    output = manager.run_llm_loop(prompts(TOKENIZER, texts, **(meta_info or {})))
    assert engine.sessions == {}, "a session was left open"
    return output, engine, search


def turns(*said):
    """A script in which every row says the same."""
    return lambda prompt, number: said[number]


def response(output: DataProto, row: int = 0) -> list[int]:
    """The response ids of a row, without padding."""
    start = output.batch["prompts"].shape[1]
    length = int(output.batch["attention_mask"][row, start:].sum())
    return output.batch["responses"][row, :length].tolist()


def masked(output: DataProto, row: int = 0) -> str:
    """The text of the tokens that the policy sampled."""
    ids = output.batch["responses"][row][output.batch["response_mask"][row].bool()]
    return TOKENIZER.decode(ids)


def record(output: DataProto, row: int = 0) -> dict:
    return output.non_tensor_batch["trajectory"][row]


def test_a_search_and_an_answer():
    said = ["<think>hm</think> <search> Orlen </search>", "<answer>a town</answer>"]
    output, _, search = run(turns(*said))
    observation = format_observation(search.documents("Orlen"))
    assert response(output) == encode(said[0]) + encode(observation) + encode(said[1])
    assert masked(output) == "".join(said)
    assert search.posts == [["Orlen"]] and search.topk == 2
    trajectory = record(output)
    assert [turn["action"] for turn in trajectory["turns"]] == ["search", "answer"]
    assert trajectory["turns"][0]["documents"] == search.documents("Orlen")
    assert trajectory["turns"][0]["search_seconds"] >= 0
    assert (trajectory["finish_reason"], trajectory["num_searches"]) == ("answer", 1)
    assert trajectory["prompt_text"] == "Q"


def test_rule_1_ids_stay_as_they_were_sampled():
    # `<` and `/` apart, and `>` and newline apart: encoding the text again would merge them.
    sampled = [token for char in "<search>x</search>" for token in encode(char)]
    assert sampled != encode("<search>x</search>")
    answer = [token for char in "<answer>\ny</answer>" for token in encode(char)]
    output, _, search = run(turns(sampled, answer))
    assert response(output) == sampled + encode(format_observation(search.documents("x"))) + answer
    assert record(output)["turns"][0]["query"] == "x"


def test_a_stop_token_that_carries_more_text_is_kept_whole():
    said = "<search>x</search>\n"  # `>` + newline is one token
    output, _, search = run(turns(said, "<answer>y</answer>"))
    assert response(output)[: len(encode(said))] == encode(said)
    assert search.posts == [["x"]]


def test_rule_3_only_sampled_tokens_have_mask_and_log_probs():
    output, _, search = run(turns("<search>x</search>", "<answer>y</answer>"))
    first = len(encode("<search>x</search>"))
    second = len(encode("<answer>y</answer>"))
    observation = len(encode(format_observation(search.documents("x"))))
    mask = output.batch["response_mask"][0]
    assert mask.tolist()[: first + observation + second] == [1] * first + [0] * observation + [1] * second
    assert mask.sum() == first + second
    log_probs = output.batch["rollout_log_probs"][0]
    expected = [-0.1 * (i + 1) for i in range(first)] + [-0.1 * (i + 1) for i in range(second)]
    assert log_probs[mask.bool()].tolist() == pytest.approx(expected)
    assert log_probs[~mask.bool()].abs().sum() == 0


@pytest.mark.parametrize("said", ["no action", "<search></search>", "<search>x", "x</search>"])
def test_a_turn_without_action_gets_the_hint_and_costs_a_turn(said):
    output, _, search = run(turns(said, "<search>x</search>", "<answer>y</answer>"))
    assert [turn["action"] for turn in record(output)["turns"]] == ["invalid", "search", "answer"]
    assert search.posts == [["x"]]
    assert HINT in TOKENIZER.decode(response(output))
    assert HINT not in masked(output)


def test_rule_8_the_hint_is_no_answer_of_the_policy():
    output, _, _ = run(turns("words", "words", "words"))
    assert "answer" not in record(output)["policy_text"] and "answer" not in masked(output)


def test_an_end_of_sequence_token_is_kept_as_sampled_and_is_not_text():
    output, _, _ = run(turns("no action", "<answer>y</answer>"))
    eos = TOKENIZER.eos_token_id
    assert response(output) == encode("no action") + [eos] + encode(HINT) + encode("<answer>y</answer>")
    assert record(output)["turns"][0]["text"] == "no action"
    assert output.batch["response_mask"][0, len(encode("no action"))] == 1


def test_after_max_turns_comes_one_last_turn_whose_search_is_not_made():
    output, engine, search = run(turns("<search>a</search>", "<search>b</search>", "<search>c</search>"))
    trajectory = record(output)
    assert search.posts == [["a"], ["b"]]
    assert trajectory["finish_reason"] == "max_turns"
    assert [turn["query"] for turn in trajectory["turns"]] == ["a", "b", "c"]
    assert trajectory["turns"][2]["documents"] is None
    assert (trajectory["num_searches"], trajectory["num_actions"], trajectory["num_valid_actions"]) == (
        2,
        3,
        3,
    )
    assert masked(output).endswith("<search>c</search>")


@pytest.mark.parametrize(
    "said, reason", [("words", "eos"), ("w" * 100, "length"), ("</answer>", "max_turns")]
)
def test_how_a_last_turn_without_answer_ended_is_said(said, reason):
    output, _, _ = run(turns(said), config=replace(CONFIG, max_turns=0))
    assert record(output)["finish_reason"] == reason
    assert record(output)["turns"][0]["action"] == "none"


def test_without_search_there_is_one_generation_to_the_answer():
    config = replace(CONFIG, do_search=False)
    engine = ScriptedEngine(TOKENIZER, turns("<search>x</search> <answer>y</answer>"))
    manager = LLMGenerationManager(TOKENIZER, engine, None, config)
    output = manager.run_llm_loop(prompts(TOKENIZER, ["Q"]))
    assert masked(output) == "<search>x</search> <answer>y</answer>"
    assert [turn["action"] for turn in record(output)["turns"]] == ["answer"]
    assert record(output)["finish_reason"] == "answer"


def test_a_turn_has_at_most_max_response_length_tokens():
    output, engine, _ = run(turns("w" * 500, "w" * 500, "w" * 500))
    assert [turn["end"] - turn["start"] for turn in record(output)["turns"]] == [80, 80, 80]
    assert {params.max_tokens for params in engine.params} == {80}


def test_a_long_observation_is_cut_before_its_closing_tag():
    search = MemorySearch(text="word " * 100)
    output, _, _ = run(turns("<search>x</search>", "<answer>y</answer>"), search=search)
    turn = record(output)["turns"][0]
    observation = response(output)[turn["obs_start"] : turn["obs_end"]]
    assert len(observation) == CONFIG.max_obs_length
    whole = encode(format_observation(search.documents("x")))
    closing = encode(INFORMATION_END)
    assert observation == whole[: CONFIG.max_obs_length - len(closing)] + closing


@pytest.mark.parametrize("room", range(1, 140, 6))
def test_the_whole_context_stays_within_max_prompt_length_and_keeps_the_question(room):
    config = replace(CONFIG, max_prompt_length=41 + room)
    question = "Where is the town of Orlen to be found? ."
    output, _, _ = run(turns("<search>x</search>", "w" * 200, "w" * 200), [question], config)
    trajectory = record(output)
    assert int(output.batch["attention_mask"].sum()) <= config.max_prompt_length
    assert trajectory["prompt_text"] == question[-40:]
    assert trajectory["finish_reason"] == "length"
    assert output.batch["responses"].shape == (1, config.max_prompt_length)


def test_a_prompt_that_fills_the_engine_ends_at_once_with_length():
    output, engine, _ = run(
        turns("w"), ["Q" * 40, "Q"], max_model_len=40, config=replace(CONFIG, max_turns=0)
    )
    assert [record(output, row)["finish_reason"] for row in (0, 1)] == ["length", "eos"]
    assert output.batch["response_mask"].sum(-1).tolist() == [0, 2]
    assert [call[0] for call in engine.calls] == ["open", "close"]


def test_a_prompt_keeps_its_last_max_start_length_tokens():
    output, _, _ = run(turns("<answer>y</answer>"), ["a" * 30 + "b" * 30])
    assert record(output)["prompt_text"] == "a" * 10 + "b" * 30
    assert output.batch["prompts"].tolist() == [encode("a" * 10 + "b" * 30)]


def test_queries_of_one_moment_go_out_together():
    def script(prompt, number):
        return f"<search>{prompt}{number}</search>" if number < 2 else "<answer>y</answer>"

    _, _, search = run(script, list("cab"))
    assert search.posts == [["c0", "a0", "b0"], ["c1", "a1", "b1"]]


def test_no_trajectory_waits_for_anothers_search():
    search = MemorySearch(held={"slow"})

    def script(prompt, number):
        if prompt == "slow":
            return ["<search>slow</search>", "<answer>s</answer>"][number]
        if number == 1:
            search.release("slow")  # only the other trajectory can free it
        return ["<search>fast</search>", "<answer>f</answer>"][number]

    output, _, _ = run(script, ["slow", "fast"], search=search)
    assert [record(output, row)["finish_reason"] for row in (0, 1)] == ["answer", "answer"]


def test_with_nothing_to_decode_the_loop_waits_for_a_search_without_stepping():
    search = MemorySearch(held={"slow"})
    timer = threading.Timer(0.2, search.release, args=["slow"])
    timer.start()
    output, engine, _ = run(turns("<search>slow</search>", "<answer>y</answer>"), search=search)
    timer.join()
    assert record(output)["finish_reason"] == "answer"
    sampled = int(output.batch["response_mask"].sum())
    assert engine.num_steps == sampled
    assert record(output)["turns"][0]["search_seconds"] >= 0.1


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_more_trajectories_than_slots(num_slots):
    def script(prompt, number):
        return f"<search>{prompt}</search>" if number == 0 else f"<answer>{prompt}</answer>"

    output, _, _ = run(script, list("abcdefg"), num_slots=num_slots)
    assert [masked(output, row)[-10:-9] for row in range(7)] == list("abcdefg")


@pytest.mark.parametrize("delay", [0, 1, 3, 1000])
def test_with_a_fixed_delay_the_engine_sees_the_same_steps_however_long_searches_take(delay):
    texts = ["a", "bb", "ccc", "dddd"]

    def script(prompt, number):
        return f"<search>{prompt}{number}</search>" if number < 2 else "w" * 9 + f"<answer>{prompt}</answer>"

    def calls(held):
        search = MemorySearch(held=held)
        timers = [threading.Timer(0.02 * i, search.release, [query]) for i, query in enumerate(held)]
        for timer in timers:
            timer.start()
        _, engine, _ = run(script, texts, replace(CONFIG, search_delay_steps=delay), search)
        for timer in timers:
            timer.join()
        return engine.calls

    at_once = calls(set())
    assert calls({"dddd0", "a0", "bb1"}) == at_once
    if delay == 3:
        asked = len(encode("<search>a0</search>"))
        assert ("resume", asked + 3, "a") in at_once


def test_rule_9_a_failed_search_takes_its_trajectory_out_and_the_others_go_on():
    def script(prompt, number):
        return f"<search>{prompt}</search>" if number == 0 else "<answer>y</answer>"

    output, _, _ = run(script, ["ok", "fail", "fine"])
    reasons = [trajectory["finish_reason"] for trajectory in output.non_tensor_batch["trajectory"]]
    assert reasons == ["answer", "search_failed", "answer"]
    assert (output.batch["response_mask"].sum(-1) > 0).tolist() == [True, False, True]
    assert output.batch["rollout_log_probs"][1].abs().sum() == 0
    turn = record(output, 1)["turns"][0]
    assert turn["documents"] is None and "it is dead" in turn["error"]
    assert record(output, 1)["num_searches"] == 0
    assert record(output, 1)["policy_text"] == "<search>fail</search>"


def test_an_error_in_the_engine_closes_all_sessions():
    engine = ScriptedEngine(TOKENIZER, turns("<answer>y</answer>"))
    engine.step = lambda: (_ for _ in ()).throw(RuntimeError("out of memory"))
    manager = LLMGenerationManager(TOKENIZER, engine, MemorySearch(), CONFIG)
    with pytest.raises(RuntimeError, match="out of memory"):
        manager.run_llm_loop(prompts(TOKENIZER, ["a", "b"]))
    assert engine.sessions == {}


def test_every_turn_is_sampled_with_the_rows_seed_and_the_batches_parameters():
    meta_info = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "validate": False}
    _, engine, _ = run(turns("<search>x</search>", "<answer>y</answer>"), ["a", "b"], meta_info=meta_info)
    assert sorted(params.seed for params in engine.params) == [1000, 1000, 1001, 1001]
    assert {(p.temperature, p.top_p, p.top_k) for p in engine.params} == {(0.7, 0.9, 20)}


def test_rule_11_greedy_is_greedy_in_every_turn():
    meta_info = {"do_sample": False, "temperature": 1.0, "top_p": 0.9, "top_k": 20}
    _, engine, _ = run(turns("<search>x</search>", "<answer>y</answer>"), meta_info=meta_info)
    assert {(p.temperature, p.top_p, p.top_k) for p in engine.params} == {(0.0, 1.0, -1)}
    assert len(engine.params) == 2


def test_the_policy_versions_of_a_trajectory_are_noted():
    class Updating(ScriptedEngine):
        def resume(self, *args):
            self.version += 1
            super().resume(*args)

    engine = Updating(TOKENIZER, turns("<search>x</search>", "<answer>y</answer>"))
    engine.version = 4
    manager = LLMGenerationManager(TOKENIZER, engine, MemorySearch(), CONFIG)
    trajectory = record(manager.run_llm_loop(prompts(TOKENIZER, ["Q"])))
    assert (trajectory["version_first"], trajectory["version_last"]) == (4, 5)


def test_a_turn_has_the_version_of_its_first_token_also_where_weights_change_within_turns():
    class Updating(ScriptedEngine):
        def step(self):
            ended = super().step()
            self.version += 1
            return ended

    said = ["<search>x</search>", "<answer>y</answer>"]
    engine = Updating(TOKENIZER, turns(*said))
    engine.version = 4
    manager = LLMGenerationManager(TOKENIZER, engine, MemorySearch(), CONFIG)
    trajectory = record(manager.run_llm_loop(prompts(TOKENIZER, ["Q"])))
    first, second = map(len, map(encode, said))
    assert [turn["version_first"] for turn in trajectory["turns"]] == [4, 4 + first]
    assert (trajectory["version_first"], trajectory["version_last"]) == (4, 4 + first + second - 1)


def test_events_tell_the_story_in_order_and_the_text_without_gaps():
    events: list[LoopEvent] = []
    said = ["été <search>x</search>", "words", "<answer>ü</answer>"]
    run(turns(*said), on_event=events.append)
    story = []
    for event in events:
        if event.kind == "text" and story and story[-1][0] == "text":
            story[-1] = ("text", story[-1][1] + event.text)
        else:
            story.append((event.kind, event.details.get("query") or event.text))
    assert story == [
        ("text", said[0]),
        ("action", "x"),
        ("observation", "x"),
        ("text", said[1]),
        ("observation", HINT),
        ("text", said[2]),
        ("end", "answer"),
    ]
    assert sum(event.kind == "text" for event in events) > 10  # as it is written, not at the end
    assert not any("\ufffd" in event.text for event in events)
    documents = [event.details["documents"] for event in events if event.kind == "observation"]
    assert documents == [MemorySearch().documents("x"), None]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"max_obs_length": 0}, "max_obs_length: found 0"),
        ({"max_turns": -1}, "max_turns: found -1"),
        ({"topk": 0}, "topk: found 0"),
        ({"max_start_length": 600}, "less than max_prompt_length"),
        ({"search_delay_steps": -1}, "search_delay_steps"),
        ({"no_think_rl": True}, "no_think_rl"),
        ({"max_in_flight": 0}, "max_in_flight: found 0"),
        ({"straggler_factor": 0.5}, "straggler_factor: found 0.5"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **wrong)


def test_search_r1s_configuration_names_the_server_itself():
    config = replace(CONFIG, num_gpus=8, search_url="http://127.0.0.1:9/retrieve", topk=5)
    with LLMGenerationManager(
        TOKENIZER, ScriptedEngine(TOKENIZER, turns()), None, config
    ).search_client as client:
        assert client.urls == ["http://127.0.0.1:9/retrieve"] and client.topk == 5


def run_config(*settings):
    return load_config(
        [
            "max_turns=3",
            "retriever.url=[http://a:1,http://b:2/x]",
            "retriever.topk=5",
            "retriever.timeout=7",
            "data.max_start_length=20",
            "data.max_prompt_length=400",
            "data.max_response_length=30",
            "data.max_obs_length=90",
            "actor_rollout_ref.rollout.temperature=0.9",
            "actor_rollout_ref.rollout.top_p=0.8",
            "actor_rollout_ref.rollout.top_k=4",
            "actor_rollout_ref.rollout.min_p=0.2",
            "actor_rollout_ref.rollout.search_delay_steps=6",
            "actor_rollout_ref.rollout.max_in_flight=9",
            "actor_rollout_ref.rollout.straggler_factor=2.5",
            *settings,
        ]
    )


def test_the_agent_of_a_run_follows_its_configuration():
    agent = build_agent(run_config(), TOKENIZER, ScriptedEngine(TOKENIZER, turns()))
    assert agent.config == GenerationConfig(
        max_turns=3,
        max_start_length=20,
        max_prompt_length=400,
        max_response_length=30,
        max_obs_length=90,
        topk=5,
        search_delay_steps=6,
        max_in_flight=9,
        straggler_factor=2.5,
        temperature=0.9,
        top_p=0.8,
        top_k=4,
        min_p=0.2,
    )
    assert agent.search_client.urls == ["http://a:1/retrieve", "http://b:2/x"]
    assert (agent.search_client.topk, agent.search_client.timeout) == (5, 7.0)
    agent.close()
    with pytest.raises(RuntimeError, match="closed"):
        agent.search_client.submit(["x"])


def test_the_ids_of_the_models_generation_config_end_a_turn_too(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    config = run_config(f"actor_rollout_ref.model.path={tmp_path}", "do_search=false", "max_turns=0")
    agent = build_agent(config, TOKENIZER, ScriptedEngine(TOKENIZER, turns()))
    assert agent.codec.eos_token_ids == {TOKENIZER.eos_token_id, 1, 2}
    assert agent.codec.decode_turn([*encode("end"), 2, 1]) == "end"


def test_programs_of_environments_run_on_the_verifiers_code_server():
    config = run_config("do_search=false", "max_turns=0", "verifiers.code.api_url=http://127.0.0.1:9")
    agent = build_agent(config, TOKENIZER, ScriptedEngine(TOKENIZER, turns()))
    row = {"reward_spec": {"ground_truth": '[{"input": "1", "output": "1"}]'}}
    for name in ("lcb", "searchcode"):
        env = agent.environments[name].open(row, [], 2).result(30).env
        client = env.client if name == "lcb" else env.tool_groups[1].client
        assert client.urls == ["http://127.0.0.1:9"]
    agent.close()
