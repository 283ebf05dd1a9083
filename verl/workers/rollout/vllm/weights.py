"""New weights for a running vLLM worker: (Hugging Face name, full tensor) pairs in, the exact model out.

    checked_stream(pairs, expected_shapes(config)) -> load_weights(worker, ...) -> [worker's model]

Used inside the worker, by whoever brings the tensors there (the colocated engine hands over the trainer's
own; a server receives them). Two things make a plain copy into the parameters wrong:

- vLLM merges and repacks matrices when it loads them (q, k, v into one; on CPU into oneDNN's own layout, the
  original is dropped). vLLM's layer-wise reload builds each layer anew and keeps the storage that is in use.
- With tied embeddings that reload never sees a tensor for `lm_head`, so on CPU the head's packed copy would
  stay that of the old weights, silently: it is packed again here.

KV state of the old weights is not this file's business: whoever calls drops it (`reset_prefix_cache` with
`reset_running_requests=True`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

TIED_HEAD = "lm_head.weight"


def expected_shapes(
    config: PretrainedConfig, *, trust_remote_code: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that a full set of weights must have; no tied `lm_head.weight`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def checked_stream(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Pass pairs on; ValueError at an unknown or wrongly shaped one, and at the end if some are missing.

    A tied `lm_head.weight` (one that `expected` doesn't have) is left out: the embedding brings it.
    """
    missing = dict(expected)
    for name, tensor in weights:
        if name == TIED_HEAD and TIED_HEAD not in expected:
            continue
        if name not in expected:
            raise ValueError(f"the model has no weight {name}; send Hugging Face names of {_some(expected)}")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}; the model's config says {expected[name]}"
            )
        missing.pop(name, None)
        yield name, tensor.detach()
    if missing:
        raise ValueError(f"missing weights: {_some(missing)}. Send the whole model")


def load_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load pairs into the worker's model, in place, and pack again what is derived from them.

    Args:
        worker: vLLM's worker (`Worker` or `CPUWorker`), or an extension of it.
        weights: the whole model, each tensor in full (not a shard), in the checkpoint's format and on any
            device. They are copied, cast to the model's dtype and cut to this rank's shard. At most the
            tensors of one layer are held, if those of a layer come one after another.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            model.load_weights(weights)
        finally:  # also after an error: until then the model lies on the meta device
            finalize_layerwise_reload(model, worker.model_config)
        _repack_tied_head(model)


def _repack_tied_head(model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # elsewhere the head multiplies with the embedding's own storage
    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {id(table.weight) for table in tables if not isinstance(table, ParallelLMHead)}
    for table in tables:
        if isinstance(table, ParallelLMHead) and id(table.weight) in embeddings:
            dispatch_cpu_unquantized_gemm(table, remove_weight=False)


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
