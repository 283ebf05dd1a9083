"""Model FLOPs of an update, against what torch counts, and rates of GPUs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import utilization
from verl.workers.engine.flops import peak_flops, peak_flops_of, training_flops

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, attn_implementation="eager",
)  # fmt: skip


def test_the_flops_of_a_row_are_those_that_torch_counts_with_half_of_attention_as_it_is_causal():
    length = 48
    model = AutoModelForCausalLM.from_config(CONFIG)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64)).logits.sum().backward()
    of_attention = 3 * 2 * 64 * length**2 * CONFIG.num_hidden_layers
    expected = counter.get_total_flops() - of_attention
    # The gradient of the first layer's input is counted here and not there, where embeddings end.
    assert training_flops(CONFIG, torch.tensor([length]), length) == pytest.approx(expected, rel=0.02)


def test_adapters_save_the_gradient_of_weights_and_a_value_model_has_no_head():
    lengths = torch.tensor([10, 20])
    whole = training_flops(CONFIG, lengths, 0)
    of_attention = 3 * 2 * 64 * (10**2 + 20**2) * CONFIG.num_hidden_layers
    with_adapters = training_flops(CONFIG, lengths, 0, has_adapters=True)
    assert with_adapters - of_attention == pytest.approx((whole - of_attention) * 2 / 3)
    assert training_flops(CONFIG, lengths, 5) - whole == 6 * 100 * 64 * 5


def test_mfu_is_the_share_of_what_the_devices_could_do_and_is_missing_where_that_is_not_known():
    ones = torch.ones(2, 10, dtype=torch.int64)
    batch = DataProto.from_dict({"attention_mask": ones, "response_mask": ones[:, 5:]})
    flops = 2 * training_flops(CONFIG, torch.tensor([10, 10]), 10)
    metrics = utilization("actor", CONFIG, batch, 2.0, flops, num_epochs=2)
    assert metrics == {"perf/mfu/actor": pytest.approx(0.5)}
    assert utilization("actor", CONFIG, batch, 2.0, None) == {}


def test_rates_are_known_of_gpus_by_their_names_in_16_bits():
    names = {
        "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA GH200 480GB": 989,
        "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362, "NVIDIA L40": 181, "NVIDIA L4": 121,
        "NVIDIA H20": 148, "Tesla V100-SXM2-32GB": 125, "NVIDIA GB200": 2500,
    }  # fmt: skip
    assert {name: peak_flops_of(name) for name in names} == {name: n * 1e12 for name, n in names.items()}
    assert peak_flops_of("NVIDIA GeForce GTX 1080") is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
