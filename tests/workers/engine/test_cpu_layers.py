"""The layers that train in bfloat16 on CPU: as near to float32 as Hugging Face's in bfloat16."""

import hashlib
import inspect

import pytest
import sharded_ranks
import torch
from ranks import run_ranks
from test_last_layer import CONFIGS, build, loss_of, micro_batch
from tiny_training import assert_same_gradients, make_actor, make_batch, make_config

from verl.packing.attention import causal_attention
from verl.packing.linear_logprob import linear_log_prob
from verl.sessions.engine_contract import SamplingParams
from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.engine import cpu_layers
from verl.workers.engine.cpu_layers import cpu_log_prob, use_cpu_layers
from verl.workers.engine.loading import keep_stream_in_float32
from verl.workers.rollout.native import NativeEngine, cpu_kernel


def test_the_files_kernels_change_with_what_they_call():
    """numba compiles a kernel anew when its own file has changed, not when one has that it calls."""
    calls = (cpu_kernel.exp_nonpositive.py_func, cpu_kernel._load, cpu_kernel._store, cpu_kernel._compiled)
    digest = hashlib.sha256("".join(map(inspect.getsource, calls)).encode()).hexdigest()[:8]
    assert digest == cpu_layers.KERNEL_DIGEST, (
        f"write {digest} there, so that no machine goes on with old code"
    )


def gradients(name, is_critic, kind, checkpoints=False):
    """(every parameter's gradient, elements kept for the backward pass) of a loss as `kind` computes it."""
    torch.manual_seed(0)
    module = build(CONFIGS[name], is_critic)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.dim() == 1 and name != "gemma3"))
    if checkpoints:
        module.model.gradient_checkpointing_enable()
    if kind == "ours":
        keep_stream_in_float32(module.model.base_model)
        assert use_cpu_layers(module)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=kind != "float32"):
        loss = loss_of(module.train(), micro_batch())
    loss.backward()
    return {key: p.grad for key, p in module.named_parameters()}, sum(kept)


@pytest.mark.parametrize("is_critic", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gradient_is_as_near_to_float32s_as_hugging_faces_own_in_bfloat16(name, is_critic):
    ours, theirs, truth = (gradients(name, is_critic, kind)[0] for kind in ("ours", "theirs", "float32"))
    for key, expected in truth.items():
        off, allowed = ((got[key] - expected).norm() / expected.norm() for got in (ours, theirs))
        assert off < max(4 * allowed, 0.03), key
    total_off, allowed = (
        sum((got[key] - truth[key]).square().sum() for key in truth) for got in (ours, theirs)
    )
    assert total_off < 2 * allowed  # squares


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpointed_layer_keeps_its_input_alone_and_has_the_same_gradients(name):
    wanted, all_kept = gradients(name, False, "ours")
    found, kept = gradients(name, False, "ours", checkpoints=True)
    assert kept < all_kept / 3
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("most", [2**26, 50 * 130])  # one chunk, and two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_in_one_pass_are_those_of_logits_in_many(monkeypatch, most, dtype):
    monkeypatch.setattr(cpu_layers, "_MOST_LOGITS", most)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in ((150, 16), (50, 16))]
    labels = torch.randint(0, 50, (150,), generator=generator)
    pull = torch.randn(2, 150, generator=generator)
    results = []
    for log_prob in (linear_log_prob, cpu_log_prob):
        hidden, weight = (x.clone().requires_grad_() for x in inputs)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = log_prob(hidden, weight, labels, 0.8, True, True)
        (outputs[0] * pull[0] + outputs[1] * pull[1]).sum().backward()
        results.append((*outputs, hidden.grad.float(), weight.grad.float()))
    for which, (expected, ours) in enumerate(zip(*results, strict=True)):
        assert (ours - expected).norm() < (1e-5 if which < 3 else 0.01) * expected.norm()


@pytest.mark.parametrize("window", [None, 30])
def test_attention_in_bfloat16_is_near_that_in_float32(window):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(heads, 150, 32, generator=generator).bfloat16() for heads in (4, 1, 1)]
    pull = torch.randn(4, 150, 32, generator=generator).bfloat16()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (x.to(dtype).requires_grad_() for x in inputs)
        out = causal_attention(query, key, value, torch.arange(150), 0.18, window)
        results.append((out, *torch.autograd.grad(out, (query, key, value), pull.to(dtype))))
    for expected, ours in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_rollout_and_trainer_agree_in_bfloat16(model_path):
    """On the token that the engine samples after each trajectory."""
    actor = make_actor(make_config(model_path, sharded_ranks.BF16))
    batch = make_batch()
    engine = NativeEngine(actor.engine.module.model.config, 8, 64, torch.bfloat16, block_size=8)
    engine.load_weights(actor.engine.weights(), version=1)
    ids = batch.batch["input_ids"]
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    last = [int(row.nonzero()[-1]) for row in batch.batch["attention_mask"]]
    rows = {
        engine.open(ids[row, end - length + 1 : end].tolist(), SamplingParams(1, seed=row)): row
        for row, (end, length) in enumerate(zip(last, lengths, strict=True))
    }
    completions = [ended for _ in range(9) if engine.has_runnable for ended in engine.step()]
    for ended in completions:
        ids[rows[ended.session_id], last[rows[ended.session_id]]] = ended.token_ids[0]
    log_probs = compute_log_prob(actor.engine, batch, actor.limits, 1.0)
    pairs = {
        (ended.log_probs[0], float(log_probs[row, last[row] - 5]))
        for ended in completions
        if (row := rows[ended.session_id]) != 3
    }  # which sampled nothing
    assert len(pairs) == 7 and sum(abs(ours - theirs) for ours, theirs in pairs) < 7 * 0.04


@pytest.mark.slow
@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_rule_5_two_processes_have_nearly_the_gradient_of_one_in_bfloat16(model_path, tmp_path):
    run_ranks(sharded_ranks.bf16_run, 2, model_path, tmp_path)
    metrics, (gradient,) = sharded_ranks.bf16_update(model_path)
    for rank in range(2):
        each = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        (rank_metrics, (of_rank,)), (_, (computed_again,)) = each
        assert all(torch.equal(x, computed_again[name]) for name, x in of_rank.items())
        assert rank_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=0.02, abs=0.01)
        assert_same_gradients(of_rank, gradient, tolerance=0.15)
        total = sum(float((of_rank[name] - x).square().sum()) for name, x in gradient.items())
        assert total < 0.05**2 * sum(float(x.square().sum()) for x in gradient.values())
