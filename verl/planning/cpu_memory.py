"""What passes and loading take of a node's memory on CPU, moment by moment: there is no GPU's margin there.

    a pass: the layers' forward, the head, the layers' backward, the embedding -> the fullest of these moments

Everything is in bytes and of one process. `scripts/bench_memory.py` compares it with real processes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from verl.packing.attention import BLOCK, FEWEST_SCORES, MOST_SCORES
from verl.packing.linear_logprob import MIN_CHUNK_ROWS, chunk_rows_of
from verl.planning.model_memory import Held, ModelSize, layer_bytes
from verl.workers.engine.loading import Precision

FLOAT32 = torch.float32.itemsize
MOST_BF16_LOGITS = 2**26  # elements of a chunk, as in verl/workers/engine/cpu_layers.py


def fullest_moment(
    size: ModelSize, held: Held, precision: Precision, tokens: int, longest: int, updates: bool, again: bool
) -> tuple[int, int, int]:
    """(weights and gradients of layers at work, activations, chunk of logits) of a pass when it takes most.
    longest: tokens of the longest trajectory. again: layers are computed again in the backward pass.

    Several processes hold gathered weights twice until they are sorted: the layers' end, so the root's count.
    """
    width = precision.compute.itemsize
    is_sharded = held.gathered_root > 0
    gathered = held.gathered
    if gathered and not is_sharded and not (size.has_vocab_head and size.ties_embeddings):
        gathered -= width * size.embedding  # an embedding is looked up as it is
    residual = tokens * size.hidden * FLOAT32
    work = tokens * width * max(3 * size.intermediate, 3 * size.query_width + 2 * size.key_width)
    chunk, matrix = _head(size, held, precision, tokens, updates)
    sorting = gathered + held.gathered_root + width * size.layer_parameters * is_sharded
    if not updates:
        return max((gathered, 3 * residual, chunk), (sorting, 3 * residual + work, 0), key=sum)
    layer = tokens * kept_for_token(size, precision, longest)
    of_layers = held.num_layers * (residual if again else layer) + 5 * residual  # and embedding, norm, wanted
    gathered += held.unreduced_gradients + held.last_reduced_gradients
    tied = FLOAT32 * size.embedding * size.ties_embeddings * (not size.adapters)
    exchanged = size.layer_parameters * (width + FLOAT32) * is_sharded
    # the root's gradient: `last_reduced_gradients` is gloo's copy of it by then; and the part that comes back
    summed = held.exchanged + held.gradients * size.root // size.trained * is_sharded
    moments = [
        (gathered, of_layers, chunk + matrix),  # the gradient of the head
        (gathered + held.gathered_root, of_layers, 0),  # the root is gathered for it
        (gathered + exchanged + tied, of_layers + layer * again + work, 0),  # that of the last layer
        (gathered + max(summed, tied + FLOAT32 * size.embedding), residual, 0),  # of the embedding
    ]
    return max(moments, key=sum)


def kept_for_token(size: ModelSize, precision: Precision, longest: int) -> int:
    """Return what autograd keeps of one decoder layer for each token.

    In bfloat16 (`cpu_layers`) a norm keeps its input in float32 and its output, heads and the MLP each tensor
    once. Probabilities are kept where `causal_attention` is the way: of half the keys, and half a block.
    """
    width = precision.compute.itemsize
    scores = size.heads * longest**2
    seen = size.heads * (longest + BLOCK) // 2
    if width == FLOAT32:
        num_bytes = layer_bytes(size, precision, False)
        if FEWEST_SCORES <= scores <= MOST_SCORES:  # and a product fewer is kept of the queries
            num_bytes += width * (seen - size.query_width)
        return num_bytes
    num_bytes = (2 * FLOAT32 + 2 * width) * size.hidden + FLOAT32 * size.query_width // size.heads
    num_bytes += 3 * width * (size.query_width + size.key_width + size.intermediate)
    return num_bytes + width * seen * (scores <= MOST_SCORES)


def _head(size: ModelSize, held: Held, precision: Precision, tokens: int, updates: bool) -> tuple[int, int]:
    """(logits of the chunk under way with those of the one before, gradient of the output matrix)."""
    if not held.has_head:
        return 0, 0
    width = precision.compute.itemsize
    trains = updates and not size.adapters
    if width == FLOAT32:  # log-probs, probabilities and their gradient; without one, log-probs and logits
        most = chunk_rows_of(size.vocab, False)
        each = FLOAT32 * (3 + (updates and tokens > most))
        return min(tokens, most) * size.vocab * each, FLOAT32 * size.embedding * trains
    most = max(MIN_CHUNK_ROWS, MOST_BF16_LOGITS // size.vocab)
    chunk = min(tokens, most) * size.vocab * width * (1 + (tokens > most))
    return chunk, (FLOAT32 + width) * size.embedding * trains


def mapped(size: ModelSize, precision: Precision, num_processes: int) -> bool:
    """Whether weights are the pages of their file until they are trained: so one process has them, where the
    file has their type. Pages come when they are looked at, after loading.
    """
    return num_processes == 1 and size.stored == precision.model


def while_loading(models: Iterable[tuple[int, int, int]]) -> int:
    """Bytes above what is held at the end, at most. models: as they are loaded, (weights, what is read of the
    files meanwhile, optimizer state that is made then).
    """
    held = most = 0
    for weights, read, state in models:
        most = max(most, held + weights + read)
        held += weights + state
    return max(0, most - held)
