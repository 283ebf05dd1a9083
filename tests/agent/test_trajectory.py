"""Records, tensors and metrics made from trajectories."""

from __future__ import annotations

import pytest
from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager, env_metrics
from verl.agent.codec import to_tensors
from verl.agent.trajectory import Trajectory, Turn
from verl.sessions.engine_contract import Partial


def example() -> Trajectory:
    """The worked example of verl/protocol.py: prompt [5, 6], sampled [7, 8], observation [9], sampled [2]."""
    trajectory = Trajectory(0, [5, 6], seed=1)
    trajectory.turns.append(Turn("search", "a", *trajectory.add_sampled([7, 8], [-0.5, -1.5])))
    trajectory.add_observation([9])
    trajectory.turns.append(Turn("answer", "b", *trajectory.add_sampled([2], [-0.25])))
    trajectory.finish_reason = "answer"
    return trajectory


def test_the_worked_example_of_the_batch_table():
    tensors = {key: value.tolist() for key, value in to_tensors([example()], 3, 5, pad_token_id=0).items()}
    assert tensors == {
        "prompts": [[0, 5, 6]],
        "responses": [[7, 8, 9, 2, 0]],
        "input_ids": [[0, 5, 6, 7, 8, 9, 2, 0]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 1, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4, 5, 0]],
        "response_mask": [[1, 1, 0, 1, 0]],
        "rollout_log_probs": [[-0.5, -1.5, 0.0, -0.25, 0.0]],
    }


def test_rule_2_padding_is_known_by_length_also_when_pad_is_a_token_of_the_text():
    for pad in (0, 2, 5, 9):
        tensors = to_tensors([example(), Trajectory(1, [5], 0)], 3, 5, pad)
        assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
        assert tensors["response_mask"].tolist() == [[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]


def test_a_record_says_what_happened_and_where():
    record = example().record("the prompt")
    assert [(turn["start"], turn["end"]) for turn in record["turns"]] == [(0, 2), (3, 4)]
    assert [(turn["obs_start"], turn["obs_end"]) for turn in record["turns"]] == [(2, 3), (None, None)]
    assert (record["num_actions"], record["num_valid_actions"], record["num_searches"]) == (2, 2, 0)
    assert (record["prompt_text"], record["policy_text"]) == ("the prompt", "a\nb")


def test_rule_9_a_masked_trajectory_has_nothing_to_learn_from():
    trajectory = example()
    trajectory.mask_all()
    tensors = to_tensors([trajectory], 3, 5, 0)
    assert tensors["response_mask"].sum() == 0 and tensors["rollout_log_probs"].abs().sum() == 0
    assert tensors["attention_mask"].sum() == 6


def record(actions: str, reason: str) -> dict:
    """`actions`: one letter a turn (s, a, i, n)."""
    names = {"s": "search", "a": "answer", "i": "invalid", "n": "none"}
    turns = [{"action": names[letter]} for letter in actions]
    valid = sum(letter in "sa" for letter in actions)
    return {"turns": turns, "num_actions": len(turns), "num_valid_actions": valid, "finish_reason": reason}


def test_the_env_metrics_are_search_r1s():
    records = [
        record("sa", "answer"),
        record("isis", "max_turns"),
        record("n", "length"),
        record("ss", "search_failed"),
        record("", "length"),
    ]
    assert env_metrics(records) == pytest.approx(
        {
            "env/number_of_actions/mean": 9 / 5,
            "env/number_of_actions/max": 4,
            "env/number_of_actions/min": 0,
            "env/finish_ratio": 1 / 5,
            "env/number_of_valid_action": 6 / 5,
            "env/ratio_of_valid_action": (1 + 0.5 + 0 + 1 + 0) / 5,
            "env/number_of_valid_search": 5 / 5,
            "env/search_failed": 1,
        }
    )


def test_the_search_clients_figures_are_those_of_one_batch():
    class Search(MemorySearch):
        counts = {"searches": 10, "cache_hits": 2, "failed": 1, "requests": 3, "request_seconds": 1.0}

        def statistics(self):
            return dict(self.counts)

    tokenizer = byte_tokenizer()
    search = Search()
    engine = ScriptedEngine(tokenizer, None)
    config = GenerationConfig(2, 40, 600, 80, 200)
    manager = LLMGenerationManager(tokenizer, engine, search, config)
    assert manager.figures([])["retrieval/request_seconds/mean"] == pytest.approx(1 / 3)
    trajectory = example()
    trajectory.turns[0].details["search_seconds"] = 0.5
    search.counts = {"searches": 14, "cache_hits": 3, "failed": 2, "requests": 5, "request_seconds": 1.5}
    assert manager.figures([trajectory, example()]) == {
        "retrieval/searches": 4.0,
        "retrieval/cache_hits": 1.0,
        "retrieval/requests": 2.0,
        "retrieval/request_seconds/mean": 0.25,
        "retrieval/wait_seconds/mean": 0.5,
        "retrieval/wait_seconds/max": 0.5,
    }
    assert manager.figures([])["retrieval/request_seconds/mean"] == 0.0
    manager = LLMGenerationManager(tokenizer, engine, MemorySearch(), config)
    assert manager.figures([example()]) == {}


def test_a_turn_that_is_kept_twice_keeps_the_version_that_began_it():
    made = Trajectory(0, [1], 0)
    made.keep(Partial([5, 6], [-0.1, -0.2], 3), version=5)
    state = {
        "response_ids": made.response_ids,
        "response_mask": made.response_mask,
        "log_probs": made.log_probs,
    }
    made.finish_reason = "kept"
    other = Trajectory.continued(0, [1], 0, {**state, "record": made.record("")})
    other.keep(Partial([7], [-0.3], 6), version=7)
    assert (other.version_begun, other.version_first, other.version_last) == (3, 3, 7)
    assert other.num_begun == 3


def test_a_turn_reads_what_the_last_of_several_contexts_holds():
    made = example()
    made.begin_context([3, 4])
    made.turns.append(Turn("step", "c", *made.add_sampled([6], [-0.1])))
    made.begin_context([8])
    assert made.contexts == [4, 7] and made.context == [8]
    made.turns.append(Turn("step", "d", *made.add_sampled([1], [-0.1])))
    assert made.context == [8, 1] and made.num_tokens == 2 + 9
