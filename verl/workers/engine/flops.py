"""The model FLOPs of an update, and the rate at which a GPU could make them.

    lengths of rows, model's configuration -> training_flops -> / (seconds * rate of all GPUs) = MFU

MFU (model FLOPs utilization, https://arxiv.org/abs/2204.02311) counts what one forward and one backward pass
of each row take by itself. Layers that are computed again to save memory are not counted again, and a
beginning that rows share is counted for each of them, although it is computed once.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import PretrainedConfig

PEAK_FLOPS = "peak_flops"  # in the meta_info of an update
# Dense FLOPs per second in bf16 and fp16, from the makers' data sheets; the first name that fits counts.
_TERA_FLOPS = (
    (r"GB200|GB300", 2500),
    (r"B200|B300", 2250),
    (r"H100.*PCIe", 756),
    (r"H100.*NVL", 835),
    (r"H20\b", 148),
    (r"H100|H200|H800|GH200", 989),
    (r"A100|A800", 312),
    (r"L40S", 362),
    (r"L40\b", 181),
    (r"L4\b", 121),
    (r"A40\b", 149.7),
    (r"A30\b", 165),
    (r"A10\b", 125),
    (r"RTX 6000 Ada", 364),
    (r"RTX A6000", 154.8),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71),
    (r"V100", 125),
    (r"T4\b", 65),
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOPs per second that a device could make in a dtype, or None if they are not known.

    They are known of some NVIDIA GPUs in 16 bits, by the GPU's name.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Return the FLOPs per second in 16 bits of a GPU with this name, or None if they are not known."""
    for pattern, tera_flops in _TERA_FLOPS:
        if re.search(rf"\b{pattern}", name):
            return tera_flops * 1e12
    return None


def layer_weights(config: PretrainedConfig) -> tuple[int, int]:
    """Return the numbers of weights that a token meets in one layer: of attention, and of the rest.

    A configuration that does not name the width of its layers' inner matrices is taken to have the usual 4
    times its own width. Of a mixture of experts those count that a token is sent to.
    """
    text = config.get_text_config()
    width = text.hidden_size
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or width // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    inner_width = getattr(text, "intermediate_size", None) or 4 * width
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        inner_width = experts * (getattr(text, "moe_intermediate_size", None) or inner_width)
    attention = 2 * width * heads * head_width + 2 * width * key_heads * head_width
    return attention, 3 * width * inner_width


def training_flops(
    config: PretrainedConfig, lengths: Tensor, num_loss_tokens: int, has_adapters: bool = False
) -> float:
    """Return the FLOPs of the forward and the backward pass of rows.

    A weight takes two operations a token forward, and four backward: two of them for its own gradient, which
    with adapters nearly no weight has. Causal attention over n tokens takes 2 n^2 h d forward, with h heads
    of width d.

    Args:
        config: the model's configuration.
        lengths: tokens of each row, [N].
        num_loss_tokens: tokens whose logits are computed; 0 for a value model.
        has_adapters: whether LoRA adapters are trained, not the model.
    """
    text = config.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = lengths.double()
    passes = 2 if has_adapters else 3  # in units of the forward pass
    of_weights = 2 * sum(layer_weights(config)) * float(tokens.sum()) * passes
    of_attention = 2 * text.num_attention_heads * head_width * float((tokens**2).sum()) * 3
    of_head = 2 * text.vocab_size * text.hidden_size * num_loss_tokens * passes
    return text.num_hidden_layers * (of_weights + of_attention) + of_head
