"""The last decoder layer, computed only for the tokens whose hidden states are used.

Of a trajectory with retrieved text fewer than half of the tokens predict a loss token. Keys and values of the
last layer are needed of all tokens; queries, output and feed-forward network only of those.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from verl.utils.attention import Packing

# h = x + attention(norm(x)); h + mlp(norm(h)), with these names
PLAIN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


def shorten_last_layer(backbone: nn.Module) -> bool:
    """Lets the last layer answer for `wanted` tokens alone (a keyword of the backbone's forward: their places
    in the pack, ascending), so that the backbone returns hidden states [1, Q, D] instead of [1, T, D]: those
    of the Q wanted tokens that this process has.

    Returns False, and changes nothing, where the layer is not one of PLAIN_LAYERS.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or type(layers[-1]) not in PLAIN_LAYERS:
        return False
    layer: Any = layers[-1]
    layer.forward = MethodType(_forward, layer)
    return True


def _forward(
    self: Any, hidden_states: Tensor, *, packing: Packing, wanted: Tensor | None = None, **kwargs: Any
) -> Tensor:
    if wanted is None:
        whole: Tensor = type(self).forward(self, hidden_states, packing=packing, **kwargs)
        return whole
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, packing=replace(packing, wanted=wanted), **kwargs)
    own = packing.own(wanted)
    rows = hidden_states.index_select(1, own) + attended.index_select(1, own)
    out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
    return out
