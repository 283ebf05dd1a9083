"""A run over two nodes, one of which is cut off: named, and on to its end by itself when the node is back."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from namespace_nodes import missing

from data_prep.microworld import write_world

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.check_node_loss import TwoNodes, done_steps, lose_a_node, metrics_of, train, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

IMPATIENT = {"RAY_health_check_failure_threshold": "3"}  # a node is missed after at most 9 seconds
SMALL = [
    "data.train_batch_size=4",
    "data.val_data_num=4",
    "data.extra_val_files=null",
    "actor_rollout_ref.rollout.n_agent=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size=8",
    "trainer.val_before_train=false",
    "trainer.val_modes=[greedy]",
    "trainer.save_freq=1",
]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_node_is_cut_off_and_the_run_goes_on_when_it_is_back(tmp_path):
    world, run_dir = tmp_path / "world", tmp_path / "run"
    write_world(7, world, num_train=32, num_test=4, num_3hop=2)
    with TwoNodes(tmp_path, world / "corpus.jsonl", IMPATIENT) as nodes:
        process = train(nodes, world, run_dir, Namespace(steps=3, seed=7, overrides=SMALL))
        wait_until(lambda: (run_dir / "global_step_1").is_dir(), process, 300)
        named = lose_a_node(nodes, process, seconds_away=0)
        assert re.search(
            r"rank \d of worker group .* died during \w+ \(node node2, 10.77.0.2, pid \d+\)", named
        )
        assert process.wait(300) == 0, process.output()[-5000:]
        said = process.output()
    assert "the Ray cluster lacks 1 node with" in said and "restart 1 of 3" in said
    (record,) = map(json.loads, (run_dir / "restarts.jsonl").read_text().splitlines())
    assert record["from_step"] in (1, 2) and record["reason"].startswith(named.removeprefix("error: "))
    assert done_steps(run_dir) == [1, 2, 3]
    assert [line["trainer/num_restarts"] for line in metrics_of(run_dir)][-1] == 1
