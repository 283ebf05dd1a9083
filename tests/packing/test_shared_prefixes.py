"""Sharing what rows have in common: found in full, and without influence on values and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, Qwen2Config, Qwen3Config

from verl.packing.attention import PACKED_ATTENTION
from verl.packing.packs import pack_rows, plan_by_prefix, prefix_order, tokens_allowed
from verl.workers.engine.loading import PolicyModel, ValueModel
from verl.workers.engine.update_loop import MicroBatchLimits

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral window": MistralConfig(**SIZES, sliding_window=3),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_key_value_heads": 1},
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
FEW_TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def arrays(sequences):
    return [np.array(sequence) for sequence in sequences]


def distinct_prefixes(sequences):
    return len({tuple(sequence[:n]) for sequence in sequences for n in range(1, len(sequence) + 1)})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(FEW_TOKENS)
def test_what_is_left_of_all_sequences_are_their_distinct_prefixes(sequences):
    order, shared = zip(*prefix_order(arrays(sequences)), strict=True)
    assert sorted(order) == list(range(len(sequences)))
    assert sum(map(len, sequences)) - sum(shared) == distinct_prefixes(sequences)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(FEW_TOKENS, st.none() | st.integers(1, 4), st.none() | st.integers(1, 12))
def test_a_plan_has_every_row_once_and_counts_shared_tokens_once(sequences, max_rows, max_tokens):
    plan = plan_by_prefix(arrays(sequences), max_rows, max_tokens)
    assert sorted(row for part in plan for row in part) == list(range(len(sequences)))
    for part in plan:
        assert max_rows is None or len(part) <= max_rows
        tokens = distinct_prefixes([sequences[row] for row in part])
        assert max_tokens is None or tokens <= max_tokens or len(part) == 1


def group_of(size, prompt, completion, first_token=0):
    """Return sequences that share a prompt and nothing else."""
    beginning = np.arange(first_token, first_token + prompt)
    return [np.concatenate([beginning, np.full(completion, 10**6 + member)]) for member in range(size)]


@pytest.mark.parametrize(
    ("prompt", "completion", "max_tokens", "rows_of_packs"),
    [
        (2048, 128, None, [8, 8]),  # 3,072 tokens each; 2,048 would have been one trajectory each
        (2048, 512, None, [8, 8]),  # 6,144 tokens, which is 2,048 and twice the prompt
        (2048, 1024, None, [4, 4, 4, 4]),
        (2048, 512, 4096, [4, 4, 4, 4]),  # the configured tokens are the limit
        (2048, 128, 1000, [1] * 16),  # a trajectory that is longer than the limit stands alone
        (512, 256, None, [8, 8]),  # 2,560 tokens
        (64, 256, None, [7, 7, 2]),  # short beginnings: 2,048 tokens, whatever is shared
    ],
)
def test_a_pack_goes_on_beyond_2048_tokens_where_a_long_beginning_would_be_computed_again(
    prompt, completion, max_tokens, rows_of_packs
):
    sequences = group_of(8, prompt, completion) + group_of(8, prompt, completion, first_token=10**5)
    limits = MicroBatchLimits.on_device(torch.device("cpu"), None, max_tokens, padded=False)
    plan = plan_by_prefix(sequences, limits.max_rows, limits.max_tokens, limits.preferred_tokens)
    assert [len(rows) for rows in plan] == rows_of_packs
    for rows in plan:
        tokens = distinct_prefixes([sequences[row].tolist() for row in rows])
        assert len(rows) == 1 or tokens <= min(tokens_allowed(2048, prompt), max_tokens or 10**9)
    on_gpu = MicroBatchLimits.on_device(torch.device("cuda"), None, max_tokens, padded=False)
    assert on_gpu.preferred_tokens is None


def alike_rows():
    """Seven rows of two prompts: duplicates, a row that begins another, short and long common parts."""
    generator = torch.Generator().manual_seed(0)
    stem = torch.randint(0, 50, (2, 24), generator=generator).tolist()
    other = torch.randint(0, 50, (8, 24), generator=generator).tolist()
    rows = [stem[0][:20], stem[0][:20], stem[0][:12] + other[0][:6], stem[0][:4] + other[1][:14]]
    rows += [stem[0][:9], stem[1][:5] + other[2][:3], stem[1][:18]]
    width = 20
    prompt = 3
    batch = {"input_ids": torch.zeros(len(rows), prompt + width, dtype=torch.int64)}
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    batch["response_mask"] = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        batch["input_ids"][i, : len(row)] = torch.tensor(row)
        batch["attention_mask"][i, : len(row)] = 1
        batch["response_mask"][i, : len(row) - prompt] = torch.tensor([1, 1, 0] * 7)[: len(row) - prompt]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


def outcome(module, packed, *arguments):
    """Outputs per cell, and gradients, of a loss that weighs every cell differently."""
    outputs = module(packed, *arguments)
    tables = [packed.unpack(x) for x in (outputs if isinstance(outputs, tuple) else [outputs])]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, *packed.shape, generator=generator)
    module.zero_grad()
    sum((table * w).sum() for table, w in zip(tables, weights, strict=False)).backward()
    return tables, [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [PolicyModel, ValueModel])
def test_sharing_changes_neither_values_nor_gradients(name, kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=PACKED_ATTENTION)
    module = kind(model if kind is PolicyModel else model.model)
    arguments = (1.0, True, True) if kind is PolicyModel else ()
    batch = alike_rows()
    shared = pack_rows(batch, range(7), "cpu")
    padded = pack_rows(batch, range(7), "cpu", pad_to_longest=True)
    assert shared.input_ids.shape[1] < 0.6 * int(batch["attention_mask"].sum())
    got = outcome(module, shared, *arguments)
    want = outcome(module, padded, *arguments)
    for ours, theirs in zip(got[0] + got[1], want[0] + want[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
