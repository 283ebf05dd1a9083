"""Two processes under FSDP2 against one plain process: loss, gradient, weights, checkpoints."""

import pytest
import sharded_ranks
import torch
from tiny_training import assert_same_gradients, make_actor
from transformers import AutoModelForCausalLM

from verl.workers.engine.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory, model_path):
    """Folder with what two ranks did, and their results."""
    out = tmp_path_factory.mktemp("two_ranks")
    sharded_ranks.run_ranks(sharded_ranks.first_run, 2, model_path, out)
    return out, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(model_path):
    return sharded_ranks.updates(model_path)


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize("variant", sharded_ranks.VARIANTS)
def test_rule_5_two_processes_have_the_loss_and_gradient_of_one(two, one, variant, kind):
    metrics, gradients = one[variant, kind]
    assert len(gradients) == 2 or kind == "critic"
    for rank_results in two[1]:
        rank_metrics, rank_gradients = rank_results["updates"][variant, kind]
        assert rank_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        for got, want in zip(rank_gradients, gradients, strict=True):
            assert_same_gradients(got, want)


def test_log_probs_of_ranks_are_those_of_one_process(two, model_path):
    actor = make_actor(sharded_ranks.settings(model_path, "packed"))
    load_checkpoint(actor.engine, two[0] / "checkpoint")
    for rank, results in enumerate(two[1]):
        expected = sharded_ranks.compute_log_prob(
            actor.engine, sharded_ranks.my_rows(rank, 2), actor.limits, 1.0
        )
        torch.testing.assert_close(results["log_probs"], expected, rtol=1e-5, atol=1e-6)


def test_the_checkpoint_of_two_ranks_loads_on_one_and_three_and_goes_on_alike(two, model_path):
    out, results = two
    actor = make_actor(sharded_ranks.settings(model_path, "packed"))
    load_checkpoint(actor.engine, out / "checkpoint")
    for name, tensor in actor.engine.weights():
        assert torch.equal(tensor, results[0]["weights"][name])
    sharded_ranks.run_ranks(sharded_ranks.resumed_run, 3, model_path, out)
    metrics, weights = results[0]["next"]
    for resumed in (
        sharded_ranks.go_on(actor, 0, 1),
        torch.load(out / "resumed_on_3.pt", weights_only=False),
    ):
        assert resumed[0] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name, tensor in resumed[1].items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=2e-4)


def test_the_hugging_face_folder_of_two_ranks_holds_the_whole_weights(two):
    out, results = two
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, results[1]["weights"][name])
