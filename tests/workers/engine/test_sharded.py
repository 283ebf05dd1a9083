"""Two processes under FSDP2, and four in every layout, against one: loss, gradient, weights, checkpoints."""

import layout_ranks
import pytest
import sharded_ranks
import torch
from ranks import run_ranks
from tiny_training import SIZES, assert_same_gradients, make_actor
from transformers import AutoConfig, AutoModelForCausalLM, Starcoder2Config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory, model_path):
    """Folder with what two ranks did, and their results."""
    out = tmp_path_factory.mktemp("two_ranks")
    run_ranks(sharded_ranks.first_run, 2, model_path, out)
    return out, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(model_path):
    return sharded_ranks.updates(model_path)


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize("variant", sharded_ranks.VARIANTS)
@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_rule_5_two_processes_have_the_loss_and_gradient_of_one(two, one, variant, kind):
    metrics, gradients = one[variant, kind]
    assert len(gradients) == 3
    for rank_results in two[1]:
        rank_metrics, rank_gradients = rank_results["updates"][variant, kind]
        assert rank_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        for got, want in zip(rank_gradients, gradients, strict=True):
            assert_same_gradients(got, want)


@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_rule_10_a_checkpoint_of_five_steps_on_two_ranks_goes_on_alike_on_one(two, model_path):
    out, results = two
    actor = make_actor(sharded_ranks.settings(model_path, "packed"))
    actor.engine.load(out / "checkpoint")
    for name, tensor in actor.engine.weights():
        assert torch.equal(tensor, results[0]["weights"][name])
        assert torch.equal(tensor.bfloat16(), results[0]["cast"][name])
    assert results[0]["gathered_as"] == {torch.bfloat16}
    assert_goes_on_alike(sharded_ranks.go_on(actor), results[0]["next"])


def assert_goes_on_alike(got, want):
    """(metrics, weights) after the next step of two runs that differ in their processes."""
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-7)
    for name, tensor in got[1].items():
        torch.testing.assert_close(tensor, want[1][name], rtol=1e-3, atol=2e-4)


@pytest.fixture(scope="module")
def four(two, model_path):
    """What four ranks did, in every layout; they have gone on from the two ranks' checkpoint."""
    run_ranks(layout_ranks.run, 4, model_path, two[0])
    return [torch.load(two[0] / f"rank{rank}_of_4.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def one_of_each(model_path):
    return layout_ranks.results_of(model_path)


@pytest.mark.parametrize("case", [*layout_ranks.CASES, ("both", "critic")], ids=": ".join)
def test_rule_5_every_layout_has_the_loss_gradient_and_weights_of_one_process(four, one_of_each, case):
    metrics, gradients, weights = one_of_each[case]
    for results in four:
        got_metrics, got_gradients, got_weights = results["cases"][case]
        assert got_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        assert_same_gradients(got_gradients, gradients)
        for name, tensor in got_weights.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=2e-4)


def test_rule_10_a_checkpoint_of_two_ranks_goes_on_alike_on_four_that_share_tokens_and_replicate(two, four):
    for results in four:
        assert_goes_on_alike(results["next"], two[1][0]["next"])
        assert results["next, again"][0] == results["next"][0]


def test_weights_that_a_pass_has_gathered_stay_while_a_checkpoint_is_written(four):
    assert all(results["stay gathered"] for results in four)


def test_rule_10_what_four_ranks_write_in_the_background_is_the_state_before_the_update_meanwhile(two, four):
    model = AutoModelForCausalLM.from_pretrained(two[0] / "checkpoint_of_4" / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, two[1][0]["weights"][name])


def test_the_processes_of_a_replica_have_the_same_log_probs(four, model_path):
    positions = [results["log_probs"][0] for results in four]
    assert [(p.rank, p.size, p.leads) for p in positions] == [
        (0, 2, True),
        (0, 2, False),
        (1, 2, True),
        (1, 2, False),
    ]
    log_probs = [results["log_probs"][1] for results in four]
    assert torch.equal(log_probs[0], log_probs[1]) and torch.equal(log_probs[2], log_probs[3])
    assert log_probs[0].any() and not torch.equal(log_probs[0], log_probs[2])


@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_the_residual_stream_is_float32_of_one_process_of_two_and_of_a_frozen_model(model_path, tmp_path):
    """In bfloat16, without the layers of a CPU; with weights that it holds exactly, log-probs are equal."""
    folder = tmp_path / "bf16"
    config = AutoConfig.from_pretrained(model_path, hidden_size=24)  # Gemma's factor is its root, rounded
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    run_ranks(sharded_ranks.stream_run, 2, str(folder), tmp_path)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    results += [sharded_ranks.stream(str(folder), stored) for stored in ("fp32", "bf16")]
    for types, log_probs in results:
        assert types == {torch.float32}
        assert torch.equal(log_probs, results[0][1])
    assert results[0][1].min() < -1


def test_a_frozen_model_with_layer_norms_computes_in_bfloat16_on_cpu(tmp_path):
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    AutoModelForCausalLM.from_config(Starcoder2Config(**sizes), dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    results = [sharded_ranks.stream(str(tmp_path), stored) for stored in ("fp32", "bf16")]
    assert all(types == {torch.float32} for types, _ in results)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0.02, atol=0.05)
