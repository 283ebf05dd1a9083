"""Muon against its formula in float64 loops, and in an update."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_training import make_actor, make_batch, make_config, save
from torch import nn

from verl.workers.engine.optim import build_optimizer

BLOCK: Any = SimpleNamespace(  # with a momentum of its own, which is a constant of runs
    name="muon", lr=0.1, betas=[0.9, 0.99], weight_decay=0.02, momentum=0.9, adamw_lr=0.03
)
MUON = ["actor_rollout_ref.actor.optim.name=muon"]


def product(left, right):
    return [
        [sum(a * row[j] for a, row in zip(line, right, strict=True)) for j in range(len(right[0]))]
        for line in left
    ]


def transposed(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def slow_newton_schulz(matrix):
    """The quintic iteration of the post on lists of floats."""
    if len(matrix) > len(matrix[0]):
        return transposed(slow_newton_schulz(transposed(matrix)))
    norm = math.sqrt(sum(x * x for line in matrix for x in line))
    x = [[value / max(norm, 1e-7) for value in line] for line in matrix]
    for _ in range(5):
        gram = product(x, transposed(x))
        squared = product(gram, gram)
        factor = [
            [-4.7750 * g + 2.0315 * s for g, s in zip(*lines, strict=True)]
            for lines in zip(gram, squared, strict=True)
        ]
        x = [
            [3.4445 * value + change for value, change in zip(*lines, strict=True)]
            for lines in zip(x, product(factor, x), strict=True)
        ]
    return x


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_muon_takes_the_steps_of_its_formula(shape):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    optimizer = build_optimizer([weight], BLOCK, matrices=[weight])
    value = weight.tolist()
    average = [[0.0] * shape[1] for _ in range(shape[0])]
    size = 0.1 * 0.2 * math.sqrt(max(shape))
    for _ in range(3):
        weight.grad = torch.randn(shape)
        gradient = weight.grad.tolist()
        optimizer.step()
        average = [
            [0.9 * m + g for m, g in zip(*lines, strict=True)]
            for lines in zip(average, gradient, strict=True)
        ]
        update = [
            [g + 0.9 * m for m, g in zip(*lines, strict=True)]
            for lines in zip(average, gradient, strict=True)
        ]
        value = [
            [w * (1 - 0.1 * 0.02) - size * o for w, o in zip(*lines, strict=True)]
            for lines in zip(value, slow_newton_schulz(update), strict=True)
        ]
        torch.testing.assert_close(
            weight.detach().double(), torch.tensor(value).double(), rtol=1e-4, atol=1e-5
        )


def test_all_but_matrices_take_the_steps_of_adamw_with_its_own_rate():
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    matrix = nn.Parameter(torch.randn(2, 2))
    optimizer = build_optimizer([*ours, matrix], BLOCK, matrices=[matrix])
    oracle = torch.optim.AdamW(theirs, lr=0.03, betas=(0.9, 0.99), weight_decay=0.02)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        optimizer.step()
        oracle.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
    same_rate = build_optimizer(
        [*ours, matrix], SimpleNamespace(**{**vars(BLOCK), "adamw_lr": None}), matrices=[matrix]
    )
    assert {group["lr"] for group in same_rate.param_groups} == {0.1}


@pytest.mark.parametrize("steps_before", [0, 2])
def test_rule_10_a_resumed_actor_takes_bitwise_the_same_steps_with_muon(model_path, tmp_path, steps_before):
    actor, resumed = (make_actor(make_config(model_path, *MUON)) for _ in range(2))
    for seed in range(steps_before):
        actor.update_policy(make_batch(seed=seed))
    save(actor.engine, tmp_path)
    resumed.update_policy(make_batch(seed=99))
    resumed.engine.load(tmp_path)
    assert actor.update_policy(make_batch(seed=7)) == resumed.update_policy(make_batch(seed=7))
    expected = dict(actor.engine.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.engine.weights())
