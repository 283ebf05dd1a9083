"""A process that samples, on the tiny base model, with each engine: what is asked for later waits."""

import importlib.util
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_r1.llm_agent.generation import build_agent
from verl.config import load_config, replace_values
from verl.protocol import DataProto, object_array
from verl.sessions.engine_contract import SamplingParams
from verl.trainer.ppo.saved_rows import continuations
from verl.utils.weight_files import WeightWriter
from verl.workers.rollout.build import EngineRequest, build_rollout_engine
from verl.workers.rollout.collective import CollectiveSender
from verl.workers.rollout_worker import MEMBER, RolloutFailed, RolloutWorker

BASE_MODEL = Path(__file__).resolve().parents[2] / "data_prep" / "base_model"
MISSING = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
ENGINES = ["native", pytest.param("vllm", marks=[pytest.mark.vllm, MISSING])]
LENGTH = 24


def rows(name, count=2, length=20):
    columns = {"raw_prompt_ids": [list(range(5, 5 + length))] * count, "uid": [name] * count}
    columns[MEMBER] = list(range(count))
    tensors = {"sampling_seeds": torch.arange(count)}
    return DataProto.from_dict(tensors, {key: object_array(value) for key, value in columns.items()})


@pytest.fixture(params=ENGINES)
def config(request):
    rollout = "actor_rollout_ref.rollout"
    overrides = [f"actor_rollout_ref.model.path={BASE_MODEL}", "do_search=false", "max_turns=1"]
    overrides += [f"data.max_response_length={LENGTH}", "trainer.async_training.group_deadline=60"]
    overrides += ["data.max_prompt_length=512", "data.max_start_length=256", f"{rollout}.max_num_seqs=16"]
    return load_config([*overrides, f"{rollout}.name={request.param}", f"{rollout}.placement=apart"])


@pytest.fixture
def worker(config):
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


@pytest.fixture(scope="module")
def other_pairs(pairs):
    return [(name, tensor * 1.3) for name, tensor in pairs]


def ended_rows(worker, num_rows):
    """So many rows that have ended."""
    found = []
    due = time.monotonic() + 60
    while sum(map(len, found)) < num_rows and time.monotonic() < due:
        if (batch := worker.poll(0.1)) is not None:
            found.append(batch)
    return DataProto.concat(found)


def polled(worker, num_rows):
    """uid and versions of so many rows that have ended."""
    batch = ended_rows(worker, num_rows)
    records = batch.non_tensor_batch["trajectory"]
    return sorted(
        (uid, record["version_first"], record["version_last"])
        for uid, record in zip(batch.non_tensor_batch["uid"], records, strict=True)
    )


def sampled(batch):
    """The tokens that each row of a batch has sampled, in the order of the rows of the group."""
    order = sorted(range(len(batch)), key=lambda row: batch.non_tensor_batch[MEMBER][row])
    mask = batch.batch["response_mask"].bool()
    return [batch.batch["responses"][row][mask[row]].tolist() for row in order]


def wait_until(condition):
    due = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < due
        time.sleep(0.001)


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
    wait_until(lambda: worker.engine.version == 0)
    worker.load_weights([writer.folder], 1)
    assert polled(worker, 2) == [("early", 0, 0)] * 2  # with the old ones, to their end
    writer.write_in_background(pairs, 1)
    made = worker.generate_sequences(rows("validation"))
    assert [record["version_first"] for record in made.non_tensor_batch["trajectory"]] == [1, 1]


def test_new_weights_in_the_midst_of_turns_change_the_tokens_behind_them_alone(
    worker, config, pairs, other_pairs
):
    """Tokens of one version are those of the engine in the trainer's process, for the same seeds."""
    worker.load_weights([pairs], 0)
    worker.submit(rows("whole", count=4))
    whole = sampled(ended_rows(worker, 4))

    load_weights = worker.engine.load_weights
    load_order = worker.service.load_weights
    worker.service.load_weights = lambda load, turns_end_first: pending.append((load, turns_end_first))
    pending = []
    advance = worker.service.advance

    def advance_and_update(news):
        lengths = [len(worker.engine.partial(i).token_ids) for i in worker.service.sessions]
        if pending and lengths and max(lengths) >= 5:
            load_order(*pending.pop())
        advance(news)

    worker.service.advance = advance_and_update
    worker.submit(rows("updated", count=4))
    worker.load_weights([other_pairs], 1)
    batch = ended_rows(worker, 4)
    assert worker.engine.load_weights == load_weights and not pending
    updated = sampled(batch)
    changed = [
        tokens[:5] == before[:5] and tokens != before for tokens, before in zip(updated, whole, strict=True)
    ]
    assert any(changed)
    records = batch.non_tensor_batch["trajectory"]
    assert any((record["version_first"], record["version_last"]) == (0, 1) for record in records)

    config = replace_values(config, {"actor_rollout_ref.rollout.placement": "colocated"})
    request = EngineRequest(torch.device("cpu"), torch.float32, 512, 8)
    colocated = build_rollout_engine(
        config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, request
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
        agent = build_agent(config, tokenizer, colocated)
        colocated.load_weights(pairs, 0)
        made = agent.run_llm_loop(rows("colocated", count=4))
        assert sampled(made.union(DataProto.from_dict({}, {MEMBER: object_array([0, 1, 2, 3])}))) == whole
        colocated.load_weights(other_pairs, 1)
        params = agent.sampling_params({})
        prompt = list(range(5, 25))
        for seed, (tokens, before) in enumerate(zip(updated, whole, strict=True)):
            num_old = next((i for i, pair in enumerate(zip(tokens, before)) if pair[0] != pair[1]), None)  # noqa: B905
            if num_old is None:
                continue
            left = len(tokens) - num_old
            rest = SamplingParams(
                left, params.temperature, params.top_p, params.top_k, params.min_p, seed, num_old
            )
            session_id = colocated.open(prompt + tokens[:num_old], rest)
            completions = []
            while not completions:
                completions = colocated.step()
            colocated.close(session_id)
            assert completions[0].token_ids == tokens[num_old:]
        agent.close()
    finally:
        colocated.shutdown()


def test_rows_that_were_under_way_go_on_elsewhere_from_their_tokens(worker, pairs):
    """As a run does that goes on from a checkpoint."""
    worker.load_weights([pairs], 0)
    worker.submit(rows("whole", count=4))
    whole = sampled(ended_rows(worker, 4))
    advance = worker.service.advance
    worker.service.advance = lambda news: time.sleep(0.02) or advance(news)
    worker.submit(rows("again", count=4))
    wait_until(
        lambda: [i for i in list(worker.service.sessions) if len(worker.engine.partial(i).token_ids) > 3]
    )
    kept = worker.continuations()
    worker.cancel({"again"})
    worker.service.advance = advance
    assert "kept" in [record["finish_reason"] for record in kept.non_tensor_batch["trajectory"]]
    resumed = rows("resumed", count=4)
    states = [None] * 4
    for row, member in enumerate(kept.non_tensor_batch[MEMBER]):
        states[member] = continuations(kept)[row]
    resumed.non_tensor_batch["continuation"] = object_array(states)
    worker.submit(resumed)
    assert sampled(ended_rows(worker, 4)) == whole


def test_weights_by_a_group_give_the_tokens_that_they_give_over_ray(worker, pairs, other_pairs):
    sender = CollectiveSender("127.0.0.1", 1, "gloo", torch.device("cpu"), 60.0)
    tokens = {"ray": [], "collective": []}
    for version, weights in enumerate([pairs, other_pairs]):
        worker.load_weights([weights], version)
        worker.submit(rows(f"ray {version}"))
        tokens["ray"] += sampled(ended_rows(worker, 2))
        worker.load_weights([pairs if version else other_pairs], version)  # which are to be replaced
        worker.load_weights([sender.send_in_background(weights, version)], version)
        worker.submit(rows(f"collective {version}"))
        tokens["collective"] += sampled(ended_rows(worker, 2))
    assert tokens["collective"] == tokens["ray"]
    assert tokens["ray"][:2] != tokens["ray"][2:]
    num_bytes = sum(tensor.nbytes for _, tensor in pairs)
    assert worker.figures()["async/sync_bytes"] == pytest.approx(6 * num_bytes, rel=0.01)
    sender.close()


def test_weights_that_could_not_be_written_end_it_with_the_reason(worker, pairs, tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, ["rollout-0"])
    (writer.folder / "1").write_text("in the way")
    worker.load_weights([writer.folder], 1)
    writer.write_in_background(pairs, 1)
    with pytest.raises(RolloutFailed, match="weights 1 were not written: FileExistsError"):
        worker.poll(30)
