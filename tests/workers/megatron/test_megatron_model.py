"""Models on Megatron, cut in several ways over 4 processes, against Hugging Face's own on one."""

import pytest
import torch
from megatron_ranks import (
    ASKED,
    Case,
    Layout,
    micro_batches,
    run_cases,
    share_of_loss,
    write_models,
)
from ranks import run_ranks

from verl.workers.engine.loading import load_policy, load_value_model

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

CASES = {
    "tensor, pipeline": Case("llama3 tied", Layout(tensor=2, pipeline=2)),
    "tensor, pipeline, recomputed": Case("qwen3 untied", Layout(tensor=2, pipeline=2, recompute=True)),
    "pipeline of 4": Case("qwen2 tied", Layout(pipeline=4)),
    "context": Case("llama3 tied", Layout(context=4)),
    "tensor, context": Case("qwen3 untied", Layout(tensor=2, context=2)),
    "tensor, pipeline, fused": Case("qwen3 untied", Layout(tensor=2, pipeline=2), fuses=True),
    "critic: tensor, context": Case("llama3 tied", Layout(tensor=2, context=2), is_policy=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory):
    """case -> what each of the 4 ranks found."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(run_cases, 4, out, folders, CASES)
    ranks = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    return {name: [results[name] for results in ranks] for name in CASES}


@pytest.fixture(scope="module")
def expected(folders):
    """expected(case) -> (outputs of each micro-batch, gradients, weights) on one process, by Hugging Face's
    model; the same for cases of the same model.
    """
    known = {}

    def of(case):
        key = case.model, case.is_policy
        if key not in known:
            known[key] = _on_one_process(folders[case.model], case.is_policy)
        return known[key]

    return of


def _on_one_process(folder, is_policy):
    load = load_policy if is_policy else load_value_model
    module = load({"path": folder}, torch.float32)
    outputs = []
    for part in micro_batches():
        outputs.append(module(part, **(ASKED if is_policy else {})))
        share_of_loss(outputs[-1]).backward()
    plain = "model." if is_policy else ""  # a policy's names are Hugging Face's behind the wrapper's "model."
    parameters = {name.removeprefix(plain): p for name, p in module.named_parameters()}
    return (
        [[output.detach() for output in of_part] for of_part in outputs],
        {name: p.grad for name, p in parameters.items()},
        {name: p.detach() for name, p in parameters.items()},
    )


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_one_process(name, found, expected):
    want_outputs, want_gradients, _ = expected(CASES[name])
    num_replicas = 1 + max(result.replica for result in found[name])
    seen = set()
    for result in found[name]:
        for got, want in zip(result.outputs, want_outputs[result.replica :: num_replicas], strict=False):
            seen.add(result.replica)
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
        assert result.gradients.keys() == want_gradients.keys()
        for key, want in want_gradients.items():
            error = (result.gradients[key] - want).norm() / want.norm()
            assert error <= 1e-5, f"{key}: off by {error}"
    assert seen == set(range(num_replicas))


@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_bit_by_bit_on_every_rank(name, found, expected):
    _, _, weights = expected(CASES[name])
    for result in found[name]:
        assert result.weights.keys() == weights.keys()
        for key, want in weights.items():
            assert torch.equal(result.weights[key], want), key
