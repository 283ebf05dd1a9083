"""A step's batch: which rounds are generated, what is chosen, what goes on in the next step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from quick_config import config_with

from verl.data.difficulty_pools import DifficultyPools
from verl.data.rl_dataset import PromptSampler
from verl.planning.passes import Passes
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.collection import (
    TrajectoryCollector,
    with_greedy_baselines,
    without_padding,
)
from verl.trainer.ppo.scoring import score

FILTER = "prompt_selection.filter_groups.enable=true"
ONE_ROUND = "prompt_selection.filter_groups.max_num_gen_batches=1"
POOLS = "prompt_selection.difficulty_pools"
MIXED = [1.0, 0.0]
SOLVED = [1.0, 1.0]
FAILED = [0.0, 0.0]


class World:
    """Prompt i is the token i; the members of its group score `scores[i]`, in order.

    `reasons[i]`: how their trajectories end, in order; "answer" where nothing is said. `searches[i]`: how
    often they search, in order; never where nothing is said.
    """

    def __init__(
        self,
        scores: list[list[float]],
        *settings: str,
        reasons: dict[int, list[str]] | None = None,
        searches: dict[int, list[int]] | None = None,
    ):
        self.scores = scores
        self.reasons = reasons or {}
        self.searches = searches or {}
        self.config = config_with(
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n_agent=2",
            "data.shuffle_train_dataloader=false",
            *settings,
        )
        order = (len(scores), 4, False, 0, self.config.prompt_selection.retire_solved)
        pools = self.config.prompt_selection.difficulty_pools
        self.sampler = DifficultyPools(pools, *order) if pools.enable else PromptSampler(*order)
        self.said: list[str] = []
        self.asked: list[DataProto] = []
        self.collector = TrajectoryCollector(
            self.config,
            Passes(self.config),
            [self.row(i) for i in range(len(scores))],  # type: ignore[arg-type]
            self.sampler,
            lambda records: {},
            self.said.append,
        )

    def row(self, i: int) -> dict[str, Any]:
        return {"raw_prompt_ids": [i], "index": i, "data_source": "nq", "reward_model": {}, "extra_info": {}}

    def collect(self, step: int = 1) -> tuple[DataProto, dict[str, float]]:
        """What the trainer's `fit` does in a step, up to the log-probs."""
        self.asked = []
        collector = self.collector
        num_groups = collector.begin()
        while num_groups > 0:
            trajectories = self.generate(collector.prompts(step, num_groups))
            score(trajectories, self.reward, self.config)  # type: ignore[arg-type]
            collector.add(trajectories)
            num_groups = collector.num_missing()
        batch, metrics = collector.selected(step, seconds=1.0)
        if collector.passes.greedy_rollouts:
            greedy = self.generate(collector.greedy_prompts(batch, step))
            score(greedy, self.reward, self.config)  # type: ignore[arg-type]
            batch, baseline_metrics = with_greedy_baselines(batch, greedy)
            metrics |= baseline_metrics
        collector.take_state()
        return without_padding(batch), metrics

    def prompts_asked(self) -> list[list[int]]:
        """Of each generation, its prompts without repeats."""
        batches = [asked.non_tensor_batch["raw_prompt_ids"].tolist() for asked in self.asked]
        return [list(dict.fromkeys(ids[0] for ids in batch)) for batch in batches]

    def generate(self, gen_batch: DataProto) -> DataProto:
        self.asked.append(gen_batch)
        uids = gen_batch.non_tensor_batch["uid"]
        num_rows = len(gen_batch)
        member: dict[str, int] = defaultdict(int)
        records = []
        mask = torch.ones(num_rows, 3, dtype=torch.long)
        for row, (uid, ids) in enumerate(
            zip(uids, gen_batch.non_tensor_batch["raw_prompt_ids"], strict=True)
        ):
            reasons = self.reasons.get(ids[0], [])
            reason = reasons[member[uid]] if member[uid] < len(reasons) else "answer"
            if reason == "search_failed":
                mask[row] = 0
            num_searches = self.searches[ids[0]][member[uid]] if ids[0] in self.searches else 0
            records.append(
                {"finish_reason": reason, "turns": [], "num_searches": num_searches, "member": member[uid]}
                | {"version_first": 0, "version_last": 0, "num_begun": 0}
            )
            member[uid] += 1
        real = torch.tensor([[0, 1, 1, 1, 1, 0]] * num_rows)  # a column of padding on both sides
        tensors = {
            "prompts": torch.zeros(num_rows, 2, dtype=torch.long),
            "responses": torch.ones(num_rows, 4, dtype=torch.long),
            "input_ids": torch.ones(num_rows, 6, dtype=torch.long),
            "attention_mask": real,
            "response_mask": torch.cat([mask, torch.zeros(num_rows, 1, dtype=torch.long)], dim=1),
            "rollout_log_probs": torch.zeros(num_rows, 4),
        }
        columns = gen_batch.non_tensor_batch | {"trajectory": object_array(records)}
        return DataProto.from_dict(tensors, columns, meta_info={"metrics": {"rollout/seconds": 1.0}})

    def reward(self, data: DataProto, return_dict: bool) -> dict[str, Any]:
        fields = data.non_tensor_batch
        found = [
            self.scores[ids[0]][record["member"]]
            for ids, record in zip(fields["raw_prompt_ids"], fields["trajectory"], strict=True)
        ]
        tensor = torch.zeros(len(data), 4)
        tensor[:, 2] = torch.tensor(found)
        members = [float(record["member"]) for record in fields["trajectory"]]
        named = {"score": found, "em": found, "f1": found, "place": members, "answer": ["x"] * len(found)}
        return {"reward_tensor": tensor, **named}


def prompts_of(batch: DataProto) -> list[int]:
    return [int(index) for index in batch.non_tensor_batch["index"][::2]]


def test_without_a_filter_a_step_is_one_batch_of_prompts_as_it_is():
    world = World([SOLVED, MIXED, FAILED, MIXED] * 2)
    batch, metrics = world.collect()
    assert prompts_of(batch) == [0, 1, 2, 3] and world.prompts_asked() == [[0, 1, 2, 3]]
    assert batch.tensors["responses"].shape == (8, 3) and batch.tensors["attention_mask"].shape == (8, 4)
    assert metrics["train/em"] == 0.5 and metrics["perf/generated_tokens"] == 24
    assert not any(name.startswith(("filter/", "pools/")) for name in metrics)


def test_without_refill_groups_with_equal_rewards_are_left_out_and_counted():
    world = World([SOLVED, MIXED, FAILED, MIXED] * 2, FILTER, ONE_ROUND)
    batch, metrics = world.collect()
    assert prompts_of(batch) == [1, 3] and len(world.asked) == 1
    assert (metrics["filter/groups"], metrics["filter/groups_left_out"]) == (4, 2)
    assert metrics["train/em"] == 0.5 and metrics["perf/generated_tokens"] == 24  # of all that was generated
    assert metrics["timing_per_token_ms/gen"] == 1000 / 24  # 12 of these 24 tokens are learnt from
    assert world.collect(2)[1]["train/score"] == 0.5 and world.sampler.position == 8


def test_with_refill_prompts_are_asked_until_enough_groups_teach_and_none_of_these_is_lost():
    world = World([MIXED, SOLVED, FAILED, MIXED, SOLVED, MIXED, MIXED, MIXED] + [MIXED] * 8, FILTER)
    batch, metrics = world.collect()
    assert world.prompts_asked() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # half of them taught, 2 are missing
    assert prompts_of(batch) == [0, 3, 5, 6, 7]  # one more than asked for
    assert metrics["filter/num_gen_batches"] == 2 and metrics["filter/groups"] == 8
    assert world.said == []
    seeds = [asked.tensors["sampling_seeds"] for asked in world.asked]
    assert not torch.isin(seeds[0], seeds[1]).any()
    assert len(set(batch.non_tensor_batch["uid"])) == 5
    assert world.collect(2)[0].non_tensor_batch["index"][0] == 8  # the next step begins behind them


def test_when_the_rounds_are_used_up_the_step_goes_on_with_a_line():
    world = World([MIXED] + [SOLVED] * 15, FILTER, "prompt_selection.filter_groups.max_num_gen_batches=3")
    batch, _ = world.collect()
    assert prompts_of(batch) == [0] and len(world.asked) == 3
    (line,) = world.said
    assert "step 1: 1 of 4 groups teach something after 3 rounds of generation and 12 prompts" in line


def test_a_step_in_which_no_group_teaches_keeps_its_rows_for_the_rest_of_the_loss():
    world = World([SOLVED] * 8, FILTER, ONE_ROUND)
    batch, metrics = world.collect()
    assert prompts_of(batch) == [0, 1, 2, 3] and metrics["filter/groups_left_out"] == 4


def test_rows_whose_search_failed_are_left_out_before_groups_are_looked_at():
    world = World([MIXED] * 8, FILTER, reasons={0: ["search_failed"], 1: ["answer", "search_failed"]})
    batch, metrics = world.collect()
    assert metrics["env/left_out"] == 4  # each of the two leaves one alone in its group
    assert prompts_of(batch) == [2, 3, 4, 5, 6, 7]  # half of them taught, so 4 were asked for the 2


@pytest.mark.parametrize(("reason", "share"), [("length", 0.5), ("answer", 0.0)])
def test_the_clip_ratio_is_the_share_of_trajectories_that_a_limit_has_cut(reason, share):
    """However long they are: all are as long as the step's longest here."""
    world = World([MIXED] * 4, reasons={0: [reason] * 2, 1: [reason] * 2})
    metrics = world.collect()[1]
    assert (metrics["response_length/clip_ratio"], metrics["prompt_length/clip_ratio"]) == (share, 0)


def test_a_step_refills_with_no_more_prompts_than_it_has_not_asked():
    world = World([SOLVED] * 6, FILTER)
    world.collect()
    assert world.prompts_asked() == [[0, 1, 2, 3], [4, 5]]
    assert "0 of 4 groups teach something after 2 rounds of generation and 6 prompts" in world.said[0]


def test_prompts_under_way_are_not_drawn_again_at_an_epoch_s_end():
    world = World([MIXED] * 10)
    for number in range(30):
        asked = [prompt % 10 for prompt in range(number, number + 4)]
        drawn = world.collector.drawn_ahead(number, 2, asked)
        rows = [int(group.non_tensor_batch["index"][0]) for group in drawn]
        assert len({*rows, *asked}) == 6


def test_remax_compares_with_one_greedy_answer_for_each_prompt():
    world = World([[1.0, 0.0], [0.5, 0.0], MIXED, MIXED], "algorithm.adv_estimator=remax")
    batch, metrics = world.collect()
    sampled, greedy = world.asked
    assert not greedy.meta_info["do_sample"] and sampled.meta_info["do_sample"]
    assert len(sampled) == 8 and len(greedy) == 4
    assert batch.tensors["reward_baselines"].tolist() == [1, 1, 0.5, 0.5, 1, 1, 1, 1]
    assert metrics["remax/baseline"] == 0.875 and metrics["remax/left_out"] == 0


def test_a_prompt_whose_greedy_answer_failed_is_left_out():
    world = World([MIXED] * 4, "algorithm.adv_estimator=remax")
    generate = world.generate

    def failing(gen_batch: DataProto) -> DataProto:
        made = generate(gen_batch)
        if not gen_batch.meta_info["do_sample"]:
            made.tensors["response_mask"][1] = 0
        return made

    world.generate = failing  # type: ignore[method-assign]
    batch, metrics = world.collect()
    assert prompts_of(batch) == [0, 2, 3] and metrics["remax/left_out"] == 2


def test_rule_10_pools_hear_of_every_round_and_survive_a_restart(tmp_path):
    settings = [FILTER, f"{POOLS}.enable=true", f"{POOLS}.easy_share=0.25"]
    scores = [SOLVED, MIXED, FAILED, MIXED, SOLVED, FAILED, MIXED, MIXED] * 2
    world = World(scores, *settings)
    _, metrics = world.collect()
    rates = world.sampler.solve_rates  # type: ignore[attr-defined]
    assert rates[:8].tolist() == [1, 0.5, 0, 0.5, 1, 0, 0.5, 0.5] and np.isnan(rates[8:]).all()
    assert metrics["pools/easy"] == metrics["pools/hard"] == 0.25
    world.collector.save(tmp_path)
    (tmp_path / "prompt_history.npz").rename(tmp_path / "difficulty_pools.npz")  # as older versions had it
    resumed = World(scores, *settings)
    resumed.sampler.load_state_dict(world.sampler.state_dict())
    resumed.collector.load(tmp_path)
    with pytest.raises(ValueError, match=f"with {POOLS}.enable=false"):
        World(scores, FILTER).collector.load(tmp_path)
    for step in (2, 3, 4):
        assert prompts_of(world.collect(step)[0]) == prompts_of(resumed.collect(step)[0])
        assert world.prompts_asked() == resumed.prompts_asked()


def test_a_row_without_a_sampled_token_counts_in_no_solve_rate():
    """The reward function scores the prompts' second rows, too, which came to nothing."""
    reasons = {0: ["answer", "search_failed"], 1: ["search_failed", "answer"], 2: ["search_failed"] * 2}
    world = World([MIXED, MIXED, SOLVED, MIXED], f"{POOLS}.enable=true", reasons=reasons)
    world.collect()
    rates = world.sampler.solve_rates  # type: ignore[attr-defined]
    assert rates[[0, 1, 3]].tolist() == [1, 0, 0.5] and np.isnan(rates[2])


THRIFT = "algorithm.thrift=1"
WASTE = {0: [1, 2], 1: [2, 2], 2: [1, 2], 3: [1, 2]}  # searches of prompts


def test_with_thrift_a_group_of_right_answers_that_differ_in_searches_is_informative():
    for settings, chosen in (([], [3]), ([THRIFT], [0, 3])):
        world = World([SOLVED, SOLVED, FAILED, MIXED], FILTER, ONE_ROUND, *settings, searches=WASTE)
        batch, metrics = world.collect()
        assert prompts_of(batch) == chosen
        assert metrics["filter/groups_left_out"] == 4 - len(chosen)


def test_with_thrift_only_right_answers_that_are_left_make_a_group_informative():
    """The second answer to the first prompt, after other searches, was cut: nothing is to be compared."""
    settings = (FILTER, ONE_ROUND, THRIFT, "algorithm.overlong_filter=true")
    world = World([SOLVED, SOLVED, FAILED, MIXED], *settings, searches=WASTE, reasons={0: ["eos", "length"]})
    assert prompts_of(world.collect()[0]) == [3]


@pytest.mark.parametrize("pools", ["false", "true"])
def test_with_thrift_a_prompt_is_not_retired_while_its_right_answers_differ_in_searches(pools):
    retire = ("prompt_selection.retire_solved=0.5", f"{POOLS}.enable={pools}")
    for settings, retired in (([], {0, 1, 3}), ([THRIFT], {1, 3})):
        world = World([SOLVED, SOLVED, FAILED, MIXED] * 3, *retire, *settings, searches=WASTE)
        _, metrics = world.collect()
        assert world.sampler.retired == retired and metrics["filter/retired"] == len(retired)


def test_thrift_counts_by_the_share_of_all_that_was_generated_whatever_the_filter_leaves():
    """Of the 12 rows with a token 6 are right; of the 6 that the filter leaves 4 are."""
    scores = [SOLVED, SOLVED, FAILED, MIXED, FAILED, MIXED, FAILED, FAILED]
    searches = {0: [1, 2], 5: [3, 1]}
    world = World(
        scores, FILTER, "prompt_selection.filter_groups.max_num_gen_batches=2", THRIFT, searches=searches,
        reasons={6: ["search_failed"] * 2, 7: ["search_failed"] * 2},
    )  # fmt: skip
    batch, metrics = world.collect()
    assert prompts_of(batch) == [0, 3, 5]
    assert metrics["thrift/guard"] == batch.meta_info["solved_share"] == pytest.approx(6 / 12)
    reasons = {1: ["length"], 2: ["length"] * 2}
    cut = World(scores, THRIFT, "algorithm.overlong_filter=true", searches=searches, reasons=reasons)
    batch, metrics = cut.collect()
    assert metrics["thrift/guard"] == 5 / 8 and prompts_of(batch) == [0, 3]
    plain = World(scores, searches=searches).collect()
    assert "thrift/guard" not in plain[1] and "solved_share" not in plain[0].meta_info


def test_a_step_has_the_figures_of_each_kind_of_question_and_failed_searches_do_not_count():
    class Kinds(World):
        def row(self, i: int) -> dict[str, Any]:
            return super().row(i) | {"data_source": "nq", "extra_info": {"hops": 1 + i % 2}}

    world = Kinds([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]], reasons={3: ["answer", "search_failed"]})
    _, metrics = world.collect()
    names = {name for name in metrics if name.startswith("kinds/")}
    assert names == {
        f"kinds/nq.hops_{hops}/{figure}"
        for hops in (1, 2)
        for figure in ("em", "score", "searches", "count", "questions")
    }
    assert metrics["kinds/nq.hops_1/score"] == 0.75 and metrics["kinds/nq.hops_1/count"] == 4
    assert metrics["kinds/nq.hops_2/score"] == pytest.approx(1 / 3)
    assert metrics["kinds/nq.hops_2/count"] == 3 and metrics["kinds/nq.hops_2/questions"] == 2
    assert metrics["train/answered"] == 1.0
