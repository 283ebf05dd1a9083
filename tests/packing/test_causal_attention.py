"""Block-wise causal attention against SDPA with a mask in float64, values and gradients."""

from dataclasses import replace

import pytest
import torch

from verl.packing.attention import Packing, causal_attention, packed_attention_forward


def by_mask(query, key, value, places, scale, window):
    distance = places[:, None] - torch.arange(key.shape[1])
    seen = (distance >= 0) & (distance < (window or 10**6))
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=seen, scale=scale, enable_gqa=True
    )[0]


def assert_equal_to_the_mask(heads, groups, places, num_keys, window):
    generator = torch.Generator().manual_seed(0)
    shapes = (len(places), heads, 16), (num_keys, groups, 16), (num_keys, groups, 16)
    inputs = [torch.randn(*shape, generator=generator).transpose(0, 1) for shape in shapes]
    ours = [x.requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    got = causal_attention(*ours, places, 0.3, window)
    want = by_mask(*theirs, places, 0.3, window)
    pull = torch.randn(got.shape, generator=generator)
    got.backward(pull)
    want.backward(pull.double())
    pairs = [(got, want), *((x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))]
    for x, y in pairs:
        assert (x.double() - y).norm() <= 1e-6 * y.norm() + 1e-9


@pytest.mark.parametrize("window", [None, 1, 30, 100])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
def test_values_and_gradients_are_those_of_sdpa(heads, groups, window):
    assert_equal_to_the_mask(heads, groups, torch.arange(200), 200, window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("fewest", [1, 10**9])  # all by blocks, or none
def test_wanted_tokens_get_what_they_get_among_all(monkeypatch, fewest, window):
    """In a pack where sequences share a beginning, and one of them is not asked for at all."""
    monkeypatch.setattr("verl.packing.attention.FEWEST_SCORES", fewest)
    lengths = (70, 30, 9, 12)
    key_lengths = (70, 80, 9, 16)
    key_index = torch.cat(
        [torch.arange(70), torch.arange(50), torch.arange(70, 100), torch.arange(100, 109),
         torch.arange(100, 104), torch.arange(109, 121)]
    )  # fmt: skip
    packing = Packing.of(lengths, "cpu", key_lengths, key_index)
    wanted = torch.tensor([0, 3, 40, 69, 70, 85, 99, 109, 120])
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 121, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    pull = torch.randn(len(wanted), 4, 8, generator=generator)
    results = []
    for asked in (None, wanted):
        packing = replace(packing, output_positions=asked)
        out, _ = packed_attention_forward(
            torch.nn.Identity(), *inputs, None, packing=packing, sliding_window=window
        )
        gradients = torch.autograd.grad((out[0, wanted] * pull).sum(), inputs)
        results.append((out[0, wanted], *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
