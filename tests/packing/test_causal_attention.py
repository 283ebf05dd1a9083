"""Block-wise causal attention against SDPA with a mask in float64, values and gradients."""

from dataclasses import replace

import pytest
import torch

from verl.packing.attention import Packing, causal_attention, is_worth_it, packed_attention_forward


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("block_scores", [2**20, 2**14, 1])
def test_long_rows_are_computed_again_and_in_parts_with_the_same_result(
    monkeypatch, dtype, window, block_scores
):
    """Kept probabilities, recomputed ones and separate groups of heads give equal bits."""
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 200, 16), (3, 200, 16), (3, 200, 16)
    inputs = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    pull = torch.randn(6, 200, 16, generator=generator).to(dtype)
    results = []
    kept = []
    for most in (2**25, 1):
        monkeypatch.setattr("verl.packing.attention.MOST_SCORES", most)
        monkeypatch.setattr("verl.packing.attention.BLOCK_SCORES", 2**20 if most > 1 else block_scores)
        out = causal_attention(*inputs, torch.arange(200), 0.3, window)
        kept.append(len(out.grad_fn.saved_tensors))
        results.append((out, *torch.autograd.grad(out, inputs, pull)))
    assert kept[1] == 4 < kept[0]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_long_rows_go_to_blocks_in_bfloat16_and_to_sdpa_in_float32():
    short = torch.empty(8, 1024, 64)
    assert is_worth_it(short, 1024) and is_worth_it(short.bfloat16(), 1024)
    assert is_worth_it(torch.empty(8, 8128, 1, dtype=torch.bfloat16), 8128)
    assert not is_worth_it(torch.empty(8, 8128, 1), 8128)


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
