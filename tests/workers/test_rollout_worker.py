"""A process that samples, on the tiny base model: what is asked for after new weights waits for them."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_r1.llm_agent.generation import build_agent
from verl.config import load_config
from verl.protocol import DataProto, object_array
from verl.utils.weight_files import WeightWriter
from verl.workers.rollout_worker import MEMBER, RolloutFailed, RolloutWorker

BASE_MODEL = Path(__file__).resolve().parents[2] / "data_prep" / "base_model"


def rows(name, count=2, length=20):
    columns = {"raw_prompt_ids": [list(range(5, 5 + length))] * count, "uid": [name] * count}
    columns[MEMBER] = list(range(count))
    tensors = {"sampling_seeds": torch.arange(count)}
    return DataProto.from_dict(tensors, {key: object_array(value) for key, value in columns.items()})


@pytest.fixture
def worker():
    overrides = [f"actor_rollout_ref.model.path={BASE_MODEL}", "do_search=false", "max_turns=1"]
    overrides += ["data.max_response_length=24", "trainer.async_training.group_deadline=30"]
    config = load_config(overrides)
    made = RolloutWorker(
        config.actor_rollout_ref, partial(build_agent, config), config.trainer.async_training, "cpu"
    )
    made.start_rollout(8, "float32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def pairs():
    model = AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32)
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def polled(worker, num_rows):
    """uid and versions of so many rows that have ended."""
    found = []
    due = time.monotonic() + 60
    while len(found) < num_rows and time.monotonic() < due:
        if (batch := worker.poll(0.1)) is not None:
            records = batch.non_tensor_batch["trajectory"]
            found += [
                (uid, record["version_first"], record["version_last"])
                for uid, record in zip(batch.non_tensor_batch["uid"], records, strict=True)
            ]
    return sorted(found)


def test_rows_begin_with_the_weights_that_were_announced_and_figures_do_not_wait(worker, pairs, tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, ["rollout-0"])
    worker.load_weights([pairs], 3)  # over Ray
    worker.submit(rows("old"))
    assert polled(worker, 2) == [("old", 3, 3)] * 2
    worker.load_weights([writer.folder], 4)
    worker.submit(rows("new"))
    worker.load_weights([writer.folder], 5)
    worker.submit(rows("newer"))
    assert worker.poll(0.5) is None and worker.engine.version == 3
    figures = worker.figures()
    assert figures["async/sync_bytes"] == sum(tensor.nbytes for _, tensor in pairs)
    writer.write(pairs, 4)
    assert polled(worker, 2) == [("new", 4, 4)] * 2
    writer.write(pairs, 5)
    assert polled(worker, 2) == [("newer", 5, 5)] * 2
    figures = worker.figures()
    sizes = [sum(path.stat().st_size for path in writer.folder.glob("*/weights.zst"))]
    assert figures["async/sync_bytes"] == sizes[0] and figures["async/sync_delay_seconds"] > 0.25


def test_a_generation_has_exactly_the_newest_weights_while_other_rows_go_on_with_the_old(
    worker, pairs, tmp_path
):
    writer = WeightWriter(tmp_path / "w", 50, ["rollout-0"])
    writer.write(pairs, 0)
    worker.load_weights([writer.folder], 0)
    worker.submit(rows("early"))
    while worker.engine.version < 0:
        time.sleep(0.01)
    worker.load_weights([writer.folder], 1)
    assert polled(worker, 2) == [("early", 0, 0)] * 2  # with the old ones, to their end
    writer.write_in_background(pairs, 1)
    made = worker.generate_sequences(rows("validation"))
    assert [record["version_first"] for record in made.non_tensor_batch["trajectory"]] == [1, 1]


def test_weights_that_could_not_be_written_end_it_with_the_reason(worker, pairs, tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, ["rollout-0"])
    (writer.folder / "1").write_text("in the way")
    worker.load_weights([writer.folder], 1)
    writer.write_in_background(pairs, 1)
    with pytest.raises(RolloutFailed, match="weights 1 were not written: FileExistsError"):
        worker.poll(30)
