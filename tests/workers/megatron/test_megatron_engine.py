"""Engines over Megatron on 4 processes against one FSDP2 process: loss, gradient, weights, checkpoints."""

import engine_ranks
import pytest
import torch
from engine_ranks import Case, load_and_update, look, make_plain, rows_of, run_updates, settings
from megatron_ranks import Layout, write_models
from ranks import run_ranks, start_server
from tiny_training import assert_same_gradients
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

LAYOUTS = {
    "TP 2": Layout(tensor=2),
    "TP 2 x PP 2": Layout(tensor=2, pipeline=2),
}
CASES = {
    **{
        f"actor, {name}, {model}": Case(
            model, layout, "actor", in_full=(model, name) == ("qwen2 tied", "TP 2 x PP 2")
        )
        for name, layout in LAYOUTS.items()
        for model in ("qwen2 tied", "qwen3 untied")
    },
    "critic, TP 2 x PP 2": Case("qwen3 untied", LAYOUTS["TP 2 x PP 2"], "critic"),
    "actor, PP 2 x CP 2": Case("qwen2 tied", Layout(pipeline=2, context=2), "actor"),
}

BF16 = {
    "actor, bf16": Case(
        "qwen3 untied",
        Layout(tensor=2, pipeline=2),
        "actor",
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",),
        parked=True,
    )
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    start_server()
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one(folders, tmp_path_factory):
    """(model, kind) -> what one FSDP2 process does; its checkpoints of before the last update in a folder."""
    out = tmp_path_factory.mktemp("one")
    results = {}
    for model, kind in {(case.model, case.kind) for case in CASES.values()}:
        worker = make_plain(kind, settings(folders[model]))
        results[model, kind] = run_updates(kind, worker, out / f"{model} {kind}")
    return out, results


@pytest.fixture(scope="module")
def four(folders, one, tmp_path_factory):
    """(folder with checkpoints, results of each rank)."""
    out = tmp_path_factory.mktemp("four")
    cases = CASES | BF16
    configs = {name: settings(folders[case.model], *case.overrides) for name, case in cases.items()}
    run_ranks(engine_ranks.run_cases, 4, out, cases, configs, folders, one[0])
    return out, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_rule_5_processes_that_share_a_model_train_it_as_one_does(one, four, name):
    case = CASES[name]
    expected = one[1][case.model, case.kind]
    for results in four[1]:
        result = results[name]
        for got, want in zip(result.metrics, expected.metrics, strict=True):
            assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert_same_gradients(result.averages, expected.averages, tolerance=1e-4)
        assert_same_gradients(result.weights, expected.weights, tolerance=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_the_other_kinds_checkpoint_with_the_same_next_loss(one, four, folders, name):
    case = CASES[name]
    expected = one[1][case.model, case.kind].metrics[-1]
    worker = make_plain(case.kind, settings(folders[case.model]))
    from_four = load_and_update(case.kind, worker, four[0] / name)
    for metrics in (four[1][0][name].resumed, from_four):
        assert metrics == pytest.approx(expected, rel=2e-4, abs=1e-6)
        # not the extremes: a single token's ratio, after the first of two optimizer steps
        means = {key: value for key, value in metrics.items() if not key.endswith(("/min", "/max"))}
        assert means == pytest.approx({key: expected[key] for key in means}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("folder", "moment"), [("huggingface", "weights"), ("many files", "weights"), ("before", "saved")]
)
def test_a_hugging_face_folder_holds_the_whole_weights(four, folder, moment):
    """Written from the engine, and from its checkpoint of before the last update."""
    name = "actor, TP 2 x PP 2, qwen2 tied"
    model = AutoModelForCausalLM.from_pretrained(four[0] / name / folder)
    saved = dict(model.named_parameters())
    weights = getattr(four[1][0][name], moment)
    assert saved.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(saved[key], tensor)


def test_a_reference_is_reset_and_comes_back_from_a_checkpoint_of_either_kind(four, folders):
    name = "actor, TP 2 x PP 2, qwen2 tied"
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    for result in (results[n] for results in four[1] for n, case in CASES.items() if case.in_full):
        torch.testing.assert_close(result.reset, result.after, **tolerance)
        torch.testing.assert_close(result.reloaded, result.after, **tolerance)
    frozen = make_plain("actor", settings(folders["qwen2 tied"]))
    frozen.engine.load_weights(four[0] / name / "reference")
    result = four[1][0][name]
    said = look("actor", frozen, rows_of(0, result.replica, result.num_replicas))
    torch.testing.assert_close(said, result.after, rtol=1e-4, atol=1e-5)


def test_weights_that_are_computed_with_in_bf16_are_trained_in_fp32(one, four):
    expected = one[1]["qwen3 untied", "actor"]
    result = four[1][0]["actor, bf16"]
    for name, tensor in expected.start.items():
        assert torch.equal(result.start[name], tensor)  # not rounded
    assert not torch.equal(result.before, expected.before)
    assert_same_gradients(result.weights, expected.weights, tolerance=0.05)
    for key in ("actor/grad_norm", "actor/kl_loss"):
        assert result.metrics[0][key] == pytest.approx(expected.metrics[0][key], rel=0.1)


def test_weights_are_read_while_the_optimizers_state_is_away(four):
    model = AutoModelForCausalLM.from_pretrained(four[0] / "actor, bf16" / "huggingface")
    saved = dict(model.named_parameters())
    for result in (results["actor, bf16"] for results in four[1]):
        assert all(torch.equal(saved[name], tensor) for name, tensor in result.weights.items())
        torch.testing.assert_close(result.reset, result.after, rtol=1e-3, atol=1e-3)


def test_an_update_that_is_not_finite_is_skipped_by_every_process(four):
    for results in four[1]:
        for name, result in results.items():
            if name in CASES and CASES[name].in_full:
                assert result.skipped["actor/num_skipped_updates"] >= 1
                assert result.skipped == pytest.approx(four[1][0][name].skipped, nan_ok=True)


def test_gradients_are_summed_while_the_backward_pass_goes_on(four):
    for results in four[1]:  # but in the first one of an engine, which counts what there is to sum
        assert results["sums"].count(False) > 1.5 * results["sums"].count(True) > 0
