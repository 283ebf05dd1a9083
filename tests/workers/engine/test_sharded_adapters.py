"""LoRA and Muon in two processes under FSDP2 against one plain process."""

import pytest
import sharded_adapters
import sharded_ranks
import torch
from ranks import run_ranks
from tiny_training import assert_same_gradients, make_actor, make_config

from verl.workers.actor.dp_actor import compute_log_prob

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory, model_path):
    """Folder with what two ranks did, and their results."""
    out = tmp_path_factory.mktemp("two_ranks_adapters")
    run_ranks(sharded_adapters.first_run, 2, model_path, out)
    return out, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(model_path):
    return sharded_adapters.updates(model_path)


@pytest.mark.parametrize("kind", sharded_adapters.KINDS)
@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_rule_5_two_processes_take_the_steps_of_one(two, one, kind):
    (metrics, gradients), (next_metrics, weights) = one[kind]
    for rank_results in two[1]:
        (rank_metrics, rank_gradients), (rank_next, rank_weights) = rank_results["updates"][kind]
        assert rank_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for got, want in zip(rank_gradients, gradients, strict=True):
            assert_same_gradients(got, want, tolerance=1e-4)
        assert rank_next == pytest.approx(next_metrics, rel=1e-3, abs=1e-5)
        for name, tensor in rank_weights.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["lora", "muon"])
def test_rule_10_the_checkpoint_of_two_ranks_goes_on_bitwise_on_two_and_alike_on_one(two, model_path, kind):
    out, results = two
    for result in results:
        metrics, weights = result[kind][1]
        assert result[kind, "resumed"][0] == metrics
        assert all(torch.equal(t, weights[name]) for name, t in result[kind, "resumed"][1].items())
    actor = sharded_adapters.make(model_path, kind)
    actor.engine.load(out / kind)
    metrics, weights = sharded_ranks.go_on(actor)
    assert metrics == pytest.approx(results[0][kind][1][0], rel=1e-3, abs=1e-5)
    for name, tensor in results[0][kind][1][1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)


def test_the_adapter_folder_of_two_ranks_is_whole(two, model_path):
    out, results = two
    path = f"actor_rollout_ref.model.lora_adapter_path={out / 'lora' / 'adapter'}"
    actor = make_actor(make_config(model_path, path))
    for rank, result in enumerate(results):
        log_probs = compute_log_prob(actor.engine, sharded_ranks.my_rows(rank, 2), actor.limits, 1.0)
        torch.testing.assert_close(result["lora"][0], log_probs, rtol=1e-5, atol=1e-6)


def test_rule_5_a_critics_adapters_and_head_have_the_gradient_of_one_process(two, model_path):
    metrics, gradients = sharded_adapters.critic_update(model_path)
    for result in two[1]:
        rank_metrics, rank_gradients = result["critic"]
        assert rank_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for got, want in zip(rank_gradients, gradients, strict=True):
            assert_same_gradients(got, want, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["lora", "muon"])
def test_a_reset_reference_over_two_processes_is_the_policy_of_that_moment_saved_or_not(two, kind):
    for result in two[1]:
        then, reference, loaded, now = result[kind, "reference"]
        assert torch.equal(reference, then) and torch.equal(loaded, then)
        assert not torch.equal(now, then)


def test_weights_that_are_kept_stay_gathered_to_the_last_micro_batch_and_no_longer(two):
    for result in two[1]:
        seen, at_the_end = result["gathered"]
        assert any(not is_last for is_last, _ in seen)
        assert all(whole != is_last for is_last, whole in seen)
        assert not at_the_end
