"""A run over two nodes, one of which is cut off: named, and on to its end by itself when the node is back."""

from __future__ import annotations

import json
import re

import pytest
from namespace_nodes import missing
from two_nodes import ENVIRONMENT, HEAD, URL, ended_in_the_end, two_nodes, wait_until

from data_prep.microworld import write_world

pytestmark = [pytest.mark.slow, pytest.mark.ray]
SMALL = """
    data.train_batch_size=4 data.val_data_num=4 data.extra_val_files=null actor_rollout_ref.rollout.n_agent=2
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size=8
    trainer.val_before_train=false trainer.val_modes=[greedy] trainer.save_freq=1
    trainer.nnodes=2 trainer.n_gpus_per_node=1 trainer.device=cpu trainer.max_restarts=3
    trainer.total_training_steps=3
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_node_is_cut_off_and_the_run_goes_on_when_it_is_back(tmp_path):
    world = tmp_path / "world"
    run_dir = tmp_path / "run"
    write_world(7, world, num_train=32, num_test=4, num_3hop=2)
    environment = {"DATA_DIR": str(world), "EXPERIMENT_NAME": "node-loss", "SEED": "7"}
    environment |= {"RAY_ADDRESS": f"{HEAD}:6379", "RETRIEVER_URL": URL}
    command = ["bash", "train_grpo.sh", f"trainer.default_local_dir={run_dir}", *SMALL.split()]
    # a node is missed after at most 9 seconds
    impatient = {"RAY_health_check_failure_threshold": "3", "RAY_health_check_timeout_ms": "2000"}
    with (
        two_nodes(tmp_path, world / "corpus.jsonl", **impatient) as (head, worker),
        ended_in_the_end(head.start(command, {**ENVIRONMENT, **environment})) as process,
    ):
        wait_until(lambda: (run_dir / "global_step_1").is_dir(), process, 300)
        before = len(process.output())
        worker.cut_off()
        wait_until(lambda: "its node is lost" in process.output()[before:], process, 60)
        worker.reconnect()
        assert process.wait(300) == 0, process.output()[-5000:]
        output = process.output()
    # Said in the error, and beside it where the checkpoint of the last step is lost with the node.
    losses = re.findall(
        r"trainer-\d on node node2 \(10.77.0.2, pid \d+\) died during \w+: its node is lost",
        output[before:],
    )
    assert "restart 1 of 3" in output
    (record,) = map(json.loads, (run_dir / "restarts.jsonl").read_text().splitlines())
    assert record["from_step"] in (1, 2) and record["reason"].startswith(tuple(losses))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3]
    assert rows[-1]["trainer/num_restarts"] == 1
