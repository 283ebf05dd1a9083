"""Decoder layers that train in bfloat16 on CPU, with one pass over memory between two matrix products.

    x (float32) -> norm -> q, k, v -> norm heads, rotate -> packed attention -> o -> x + norm
                -> norm -> gate, up -> activation -> down -> x + norm -> the next layer

Hugging Face's layers take five to fifteen passes over memory for a norm, a rotation or an activation, and
more in the backward pass. Where products in bfloat16 are fast, these passes cost as much as the products.
Here each of these operations is one kernel forward and one backward, compiled by numba. The kernels compute
in float32, as does the residual stream (`keep_stream_in_float32`). Linear layers are the module's own, so
adapters, sharding and autocast work as ever.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from verl.packing.attention import Packing, packed_attention_forward
from verl.packing.linear_logprob import MIN_CHUNK_ROWS
from verl.workers.engine.loading import PolicyModel, ValueModel, set_forward
from verl.workers.rollout.native.cpu_kernel import (
    ACTIVATION_CODES,
    SILU,
    as_array,
    exp_nonpositive,
    jit,
    load,
    share_rows,
    store,
)

LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, Gemma3DecoderLayer)
# Digest of the functions of cpu_kernel.py that these kernels call. A test says why, and what to write here.
KERNEL_DIGEST = "1be8d061"
_MOST_LOGITS = 2**26  # in a chunk of rows: 128 MB
_FLOOR = np.float32(-1e4)
_BLOCK = 64  # rows whose share of a weight's gradient is summed together
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_THREE = np.float32(3.0)
_GELU_SCALE = np.float32(0.7978845608028654)
_GELU_CUBE = np.float32(0.044715)


def use_cpu_layers(module: PolicyModel | ValueModel) -> bool:
    """Let a model compute with the layers of this module.

    Return False, and change nothing, if the model's layers are of other classes than LAYERS or have another
    activation than those of ACTIVATION_CODES.
    """
    backbone: Any = module.model.base_model
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or any(type(layer) not in LAYERS for layer in layers):
        return False
    if _activation(layers[0]) not in ACTIVATION_CODES:
        return False
    for layer in layers:
        set_forward(layer, partial(_forward, layer, is_last=layer is layers[-1]))
    if isinstance(module, PolicyModel):
        module.log_prob = cpu_log_prob
    return True


def _forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    packing: Packing,
    is_last: bool,
    output_positions: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute a layer: [1, T, D] float32 -> the same shape and dtype.

    The last layer computes only the wanted tokens, and returns [1, Q, D] (see `shorten_last_layer`).
    """
    output_positions = output_positions if is_last else None
    attention = self.self_attn
    mlp = self.mlp
    is_gemma = isinstance(self, Gemma3DecoderLayer)
    x = hidden_states[0]
    normed = _apply_norm(x, self.input_layernorm, is_gemma)
    heads = (len(x), -1, attention.head_dim)
    query, key, value = (getattr(attention, f"{name}_proj")(normed).view(heads) for name in "qkv")
    half = attention.head_dim // 2
    cos, sin = (table[0, :, :half].float().contiguous() for table in position_embeddings)
    for_query, for_key = (getattr(attention, f"{name}_norm", None) for name in "qk")
    query = _norm_and_rotate(query, for_query, cos, sin, is_gemma)
    key = _norm_and_rotate(key, for_key, cos, sin, is_gemma)
    window_config = self.self_attn.config if isinstance(self, MistralDecoderLayer) else attention
    query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
    attended = packed_attention_forward(
        attention,
        query,
        key,
        value,
        None,
        scaling=attention.scaling,
        packing=packing if output_positions is None else replace(packing, output_positions=output_positions),
        sliding_window=getattr(window_config, "sliding_window", None),
    )[0]
    attended = attended[0].flatten(1)
    if output_positions is not None:
        local_positions = packing.local_positions(output_positions)
        x = x.index_select(0, local_positions)
        attended = attended.index_select(0, local_positions)
    out = attention.o_proj(attended)
    if is_gemma:
        x = _Norm.apply(out, self.post_attention_layernorm.weight, self.post_attention_layernorm.eps, 1.0, x)
        normed = _apply_norm(x, self.pre_feedforward_layernorm, True)
    else:
        x = x + out
        normed = _apply_norm(x, self.post_attention_layernorm, False)
    code = ACTIVATION_CODES[_activation(self)]
    out = mlp.down_proj(_Gated.apply(mlp.gate_proj(normed), mlp.up_proj(normed), code))
    if is_gemma:
        out_norm = self.post_feedforward_layernorm
        return _Norm.apply(out, out_norm.weight, out_norm.eps, 1.0, x).unsqueeze(0)
    return (x + out).unsqueeze(0)


def _activation(layer: Any) -> str:
    """Return the name of a layer's activation function, as in the model's configuration."""
    config = layer.mlp.config
    return str(config.hidden_activation if isinstance(layer, Gemma3DecoderLayer) else config.hidden_act)


def _apply_norm(x: Tensor, norm: Any, is_gemma: bool) -> Tensor:
    """Return x [T, D] float32 after one of the layer's norms, in bfloat16."""
    eps = norm.eps if is_gemma else norm.variance_epsilon
    return _Norm.apply(x, norm.weight, eps, 1.0 if is_gemma else 0.0, None)


def _norm_and_rotate(x: Tensor, norm: Any, cos: Tensor, sin: Tensor, is_gemma: bool) -> Tensor:
    """Return the heads x [T, H, D], normed if the model norms heads (`norm` is not None), and rotated."""
    weight = None
    eps = 0.0
    if norm is not None:
        weight = norm.weight
        eps = norm.eps if is_gemma else norm.variance_epsilon
    return _Rotated.apply(x, weight, cos, sin, eps, 1.0 if is_gemma else 0.0)


class _Norm(torch.autograd.Function):
    """The RMS norm of x [T, D] (float32 or bfloat16) times offset + weight [D].

    The result is bfloat16. If `residual` [T, D] float32 is given, the result is a new float32 tensor, the sum
    of the residual and the norm.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        factors = weight.float() + offset
        out = torch.empty(x.shape, dtype=torch.bfloat16 if residual is None else torch.float32)
        stream = np.empty((0, 0), dtype=np.float32) if residual is None else residual.contiguous().numpy()
        arguments = as_array(x), factors.numpy(), np.float32(eps), stream, as_array(out)
        share_rows(_norm_forward, len(x), *arguments)
        ctx.save_for_backward(x, factors)
        ctx.eps = np.float32(eps)
        ctx.dtype = weight.dtype
        ctx.adds = residual is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factors = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        block_grads = torch.zeros(-(-len(x) // _BLOCK), x.shape[1])
        arguments = as_array(x), factors.numpy(), ctx.eps, as_array(grad), as_array(grad_x)
        share_rows(_norm_backward, len(block_grads), *arguments, block_grads.numpy())
        return grad_x, block_grads.sum(0).to(ctx.dtype), None, None, grad if ctx.adds else None


class _Rotated(torch.autograd.Function):
    """The heads x [T, H, D] bfloat16, rotated by cos and sin [T, D / 2] float32.

    If there is a weight [D], the heads are normed first.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, offset: float
    ) -> Tensor:
        x = x.contiguous()
        factors = torch.empty(0) if weight is None else weight.float() + offset
        out = torch.empty_like(x)
        tables = cos.numpy(), sin.numpy()
        arguments = as_array(x), factors.numpy(), np.float32(eps), *tables, as_array(out)
        share_rows(_rotate_forward, len(x), *arguments)
        ctx.save_for_backward(x, factors, cos, sin)
        ctx.eps = np.float32(eps)
        ctx.dtype = None if weight is None else weight.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factors, cos, sin = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        block_grads = torch.zeros(-(-len(x) // _BLOCK), len(factors))
        arguments = as_array(x), factors.numpy(), ctx.eps, cos.numpy(), sin.numpy(), as_array(grad)
        share_rows(_rotate_backward, len(block_grads), *arguments, as_array(grad_x), block_grads.numpy())
        grad_weight = None if ctx.dtype is None else block_grads.sum(0).to(ctx.dtype)
        return grad_x, grad_weight, None, None, None, None


class _Gated(torch.autograd.Function):
    """The product activation(gate) * up, where all are [T, I] bfloat16."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, code: int) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        out = torch.empty_like(gate)
        share_rows(_gate_forward, len(gate), as_array(gate), as_array(up), code, as_array(out))
        ctx.save_for_backward(gate, up)
        ctx.code = code
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty_like(gate)
        grad_up = torch.empty_like(up)
        inputs = as_array(gate), as_array(up), ctx.code, as_array(grad.contiguous())
        share_rows(_gate_backward, len(gate), *inputs, as_array(grad_gate), as_array(grad_up))
        return grad_gate, grad_up, None


def cpu_log_prob(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, *ignored: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `linear_log_prob` computes, always all three outputs.

    Logits are bfloat16, with one pass over them forward and one backward.
    """
    with torch.autocast("cpu", enabled=False):
        return _LogProb.apply(hidden, weight, labels, temperature)


class _LogProb(torch.autograd.Function):
    """The log-probabilities of `cpu_log_prob`; see `_LinearLogProb`.

    The gradient of the weight is summed over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = hidden.bfloat16()
        matrix = weight.bfloat16()
        scale = np.float32(1.0 / temperature)
        figures = torch.empty(4, len(hidden))
        chunks = range(0, len(hidden), max(MIN_CHUNK_ROWS, _MOST_LOGITS // len(weight)))
        for start in chunks:
            rows = slice(start, start + chunks.step)
            logits = inputs[rows] @ matrix.t()
            arguments = as_array(logits), labels[rows].numpy(), scale, figures[:, rows].numpy()
            share_rows(_log_prob_forward, len(logits), *arguments)
        saved_logits = logits if len(chunks) == 1 else None
        ctx.save_for_backward(inputs, matrix, labels, figures, saved_logits)
        ctx.chunks = chunks
        ctx.scale = scale
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.set_materialize_grads(False)
        log_probs, entropy, sum_pi_squared = figures[:3].unbind()
        ctx.mark_non_differentiable(sum_pi_squared)
        return log_probs.clone(), entropy.clone(), sum_pi_squared.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        inputs, matrix, labels, figures, logits = ctx.saved_tensors
        pulls = torch.zeros(2, len(inputs))
        for pull, grad in zip(pulls, (grad_log_probs, grad_entropy), strict=True):
            if grad is not None:
                pull.copy_(grad)
        grad_hidden = torch.empty_like(inputs)
        grad_weight = None
        sum_dtype = torch.float32 if len(ctx.chunks) > 1 else ctx.dtypes[1]
        for start in ctx.chunks:
            rows = slice(start, start + ctx.chunks.step)
            if len(ctx.chunks) > 1:
                logits = inputs[rows] @ matrix.t()
            arguments = labels[rows].numpy(), ctx.scale, figures[:, rows].numpy(), pulls[:, rows].numpy()
            share_rows(_log_prob_backward, len(logits), as_array(logits), *arguments)
            grad_hidden[rows] = logits @ matrix
            if ctx.needs_input_grad[1]:  # False for a head that is frozen beside LoRA adapters
                chunk_grad = logits.t() @ inputs[rows]
                grad_weight = (
                    chunk_grad.to(sum_dtype) if grad_weight is None else grad_weight.add_(chunk_grad)
                )
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.dtypes[1])
        return grad_hidden.to(ctx.dtypes[0]), grad_weight, None, None


@jit
def _log_prob_forward(first, last, logits, labels, scale, figures):
    """Fill figures [4, N] from logits.

    The figures are the log-prob of the label, the entropy, the sum of squared probabilities, and the log of
    the sum of exp.
    """
    for row in range(first, last):
        top = load(logits[row, 0])
        for i in range(logits.shape[1]):
            top = max(top, load(logits[row, i]))
        total = _ZERO
        weighted = _ZERO
        squared = _ZERO
        for i in range(logits.shape[1]):
            above = (load(logits[row, i]) - top) * scale
            power = exp_nonpositive(above)
            total += power
            weighted += power * max(above, _FLOOR)  # where power is 0, above may be -inf
            squared += power * power
        log_total = np.float32(np.log(total))
        figures[0, row] = (load(logits[row, labels[row]]) - top) * scale - log_total
        figures[1, row] = log_total - weighted / total
        figures[2, row] = squared / (total * total)
        figures[3, row] = top * scale + log_total


@jit
def _log_prob_backward(first, last, logits, labels, scale, figures, pulls):
    """Replace the logits by their gradient, (a (onehot - p) - b p (log p + H)) / temperature."""
    for row in range(first, last):
        label_pull = pulls[0, row] * scale
        entropy_pull = pulls[1, row] * scale
        for i in range(logits.shape[1]):
            log_p = load(logits[row, i]) * scale - figures[3, row]
            pull = label_pull + entropy_pull * (max(log_p, _FLOOR) + figures[1, row])
            value = -exp_nonpositive(log_p) * pull
            if i == labels[row]:
                value += label_pull
            logits[row, i] = store(value, logits[row, i])


@jit
def _inverse_rms(x, eps):
    """Return 1 / rms(x), the factor of an RMS norm without its weight."""
    total = _ZERO
    for i in range(x.shape[0]):
        total += load(x[i]) * load(x[i])
    return np.float32(_ONE / np.sqrt(total / np.float32(x.shape[0]) + eps))


@jit
def _norm_forward(first, last, x, weight, eps, residual, out):
    """Fill out with the norm of x, plus the residual if it has rows."""
    for row in range(first, last):
        factor = _inverse_rms(x[row], eps)
        if residual.shape[0] > 0:
            for i in range(x.shape[1]):
                out[row, i] = store(load(x[row, i]) * factor * weight[i] + residual[row, i], out[row, i])
        else:
            for i in range(x.shape[1]):
                out[row, i] = store(load(x[row, i]) * factor * weight[i], out[row, i])


@jit
def _norm_backward(first, last, x, weight, eps, grad, grad_x, grad_weight):
    """Compute the norm's gradients for blocks of rows; `first` and `last` count blocks.

    With r = 1 / rms(x): dx = r (w g) - x r^3 mean(w g x), dw = sum of g x r.
    """
    width = x.shape[1]
    for block in range(first, last):
        for row in range(block * _BLOCK, min((block + 1) * _BLOCK, x.shape[0])):
            factor = _inverse_rms(x[row], eps)
            total = _ZERO
            for i in range(width):
                total += load(grad[row, i]) * weight[i] * load(x[row, i])
            pull = total * factor * factor * factor / np.float32(width)
            for i in range(width):
                value = load(x[row, i])
                g = load(grad[row, i])
                grad_weight[block, i] += g * value * factor
                grad_x[row, i] = store(g * weight[i] * factor - value * pull, grad_x[row, i])


@jit
def _rotate_forward(first, last, x, weight, eps, cos, sin, out):
    """Fill out with the rotated heads of x. If `weight` has entries, the heads are normed first."""
    half = cos.shape[1]
    for row in range(first, last):
        for head in range(x.shape[1]):
            is_normed = weight.shape[0] > 0
            factor = _inverse_rms(x[row, head], eps) if is_normed else _ONE
            for i in range(half):
                a = load(x[row, head, i]) * factor
                b = load(x[row, head, half + i]) * factor
                if is_normed:
                    a = a * weight[i]
                    b = b * weight[half + i]
                c = cos[row, i]
                s = sin[row, i]
                out[row, head, i] = store(a * c - b * s, out[row, head, i])
                out[row, head, half + i] = store(b * c + a * s, out[row, head, i])


@jit
def _rotate_backward(first, last, x, weight, eps, cos, sin, grad, grad_x, grad_weight):
    """Compute the gradients of the rotation and of the norm before it, for blocks of rows.

    `first` and `last` count blocks. The gradient is rotated back, and then goes through the norm's backward
    pass.
    """
    half = cos.shape[1]
    turned = np.empty(2 * half, dtype=np.float32)
    for block in range(first, last):
        for row in range(block * _BLOCK, min((block + 1) * _BLOCK, x.shape[0])):
            for head in range(x.shape[1]):
                for i in range(half):
                    a = load(grad[row, head, i])
                    b = load(grad[row, head, half + i])
                    c = cos[row, i]
                    s = sin[row, i]
                    turned[i] = a * c + b * s
                    turned[half + i] = b * c - a * s
                factor = _ONE
                pull = _ZERO
                if weight.shape[0] > 0:
                    factor = _inverse_rms(x[row, head], eps)
                    total = _ZERO
                    for i in range(2 * half):
                        value = load(x[row, head, i])
                        grad_weight[block, i] += turned[i] * value * factor
                        turned[i] *= weight[i]
                        total += turned[i] * value
                    pull = total * factor * factor * factor / np.float32(2 * half)
                for i in range(2 * half):
                    value = turned[i] * factor - load(x[row, head, i]) * pull
                    grad_x[row, head, i] = store(value, grad_x[row, head, i])


@jit
def _sigmoid(x):
    e = exp_nonpositive(-abs(x))
    return (e if x < _ZERO else _ONE) / (_ONE + e)


@jit
def _gate_forward(first, last, gate, up, code, out):
    """Compute activation(gate) * up.

    The tanh form of gelu is x sigmoid(2 c (x + 0.0447 x^3)).
    """
    for row in range(first, last):
        for i in range(gate.shape[1]):
            x = load(gate[row, i])
            inner = x if code == SILU else _TWO * _GELU_SCALE * (x + _GELU_CUBE * x * x * x)
            out[row, i] = store(x * _sigmoid(inner) * load(up[row, i]), out[row, i])


@jit
def _gate_backward(first, last, gate, up, code, grad, grad_gate, grad_up):
    """Fill the gradients of gate and up from that of activation(gate) * up."""
    for row in range(first, last):
        for i in range(gate.shape[1]):
            x = load(gate[row, i])
            g = load(grad[row, i])
            inner = x
            slope = _ONE
            if code != SILU:
                inner = _TWO * _GELU_SCALE * (x + _GELU_CUBE * x * x * x)
                slope = _TWO * _GELU_SCALE * (_ONE + _THREE * _GELU_CUBE * x * x)
            s = _sigmoid(inner)
            grad_up[row, i] = store(g * x * s, grad_up[row, i])
            grad_gate[row, i] = store(
                g * load(up[row, i]) * s * (_ONE + x * (_ONE - s) * slope), grad_gate[row, i]
            )
