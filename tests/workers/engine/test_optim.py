"""AdamW against its formula, and learning-rate schedules."""

from dataclasses import replace

import pytest
import torch

from verl.config.policy import Optim
from verl.workers.engine.optim import build_optimizer, build_scheduler, lr_factor

BLOCK = Optim(lr=0.1, betas=[0.9, 0.99], weight_decay=0.02)


def rates(num_steps, **changes):
    block = replace(BLOCK, **changes)
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], block)
    scheduler = build_scheduler(optimizer, block)
    seen = []
    for _ in range(num_steps):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_adamw_takes_the_steps_of_its_formula():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = build_optimizer([parameter], BLOCK)
    value = [1.0, -2.0]
    m = [0.0, 0.0]
    v = [0.0, 0.0]
    for step, gradient in enumerate([(0.5, -1.0), (0.25, 2.0), (-3.0, 0.0)], start=1):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.99 * v[i] + 0.01 * g * g
            update = (m[i] / (1 - 0.9**step)) / ((v[i] / (1 - 0.99**step)) ** 0.5 + 1e-8)
            value[i] = value[i] * (1 - 0.1 * 0.02) - 0.1 * update
    assert parameter.tolist() == pytest.approx(value, rel=1e-5)


def test_warm_up_is_linear_and_wastes_no_update_on_zero():
    assert rates(5, lr_warmup_steps=4) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert rates(3, lr_warmup_steps_ratio=0.2, total_training_steps=10) == pytest.approx([0.05, 0.1, 0.1])
    assert rates(2) == [0.1, 0.1]


def test_linear_and_cosine_fall_to_the_smallest_rate_and_stay_there():
    linear = rates(7, warmup_style="linear", total_training_steps=5, min_lr_ratio=0.5)
    assert linear == pytest.approx([0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.05])
    cosine = rates(5, warmup_style="cosine", total_training_steps=4)
    assert cosine == pytest.approx([0.1, 0.0853553, 0.05, 0.0146447, 0.0], abs=1e-6)
    assert lr_factor(1, num_warmup=2, num_total=4, style="cosine", min_ratio=0.3) == 1.0
