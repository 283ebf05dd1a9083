"""The policy's weights on their way into vLLM's model.

    this process, or one that vLLM has started: (name, tensor) pairs, or a file of them -+
    a vLLM server: broadcasts of the trainer (verl/workers/rollout/remote/weights.py) ---+-> vLLM's model

`WeightReceiver` is vLLM's `worker_extension_cls`, in this process or in another one: vLLM mixes the class
into its worker, on every rank, and `collective_rpc("rollout_...")` calls its methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig

from verl.sessions.engine_contract import checked_weights
from verl.workers.rollout.remote.weights import Group, Pairs, weights_in_folder

WORKER_EXTENSION = "verl.workers.rollout.vllm.weight_transfer.WeightReceiver"


class WeightReceiver:
    """The methods that are mixed into vLLM's `Worker`. `self` is the worker.

    Over HTTP arguments are strings. Errors go back to the caller. A server lives on after an error, but
    perhaps only a part of its weights is new.
    """

    rank: int
    device: torch.device
    model_runner: Any
    model_config: Any

    def rollout_install_sampler(self) -> None:
        """Replace the sampler by one with seeds per session and both kinds of log-prob (`sampler.py`)."""
        from verl.workers.rollout.vllm.sampler import SessionSampler

        self.model_runner.sampler = SessionSampler(self.model_runner)

    def rollout_join(self, backend: str, host: str, port: str, size: str) -> None:
        """Enter the group of the trainer that listens at this address."""
        device = self.device if backend == "nccl" else torch.device("cpu")
        self._rollout_group = Group.join(backend, device, host, int(port), 1 + self.rank, int(size))

    def rollout_receive(self, update: str, version: str) -> str:
        """Take the weights that the trainer broadcasts, and return their version."""
        stream = self._rollout_group.receive(int(update))
        try:
            self.rollout_load_weights(stream)
        finally:
            for _ in stream:  # also after an error, as nobody else must wait for this worker
                pass
        return version

    def rollout_load_weights(self, weights: Pairs) -> None:
        """Take the whole model: each tensor in full (not a shard), in the checkpoint's format.

        The tensors are cast to the model's dtype and cut to this rank's shard. At most the tensors of one
        layer are held, if those of a layer come one after another. The caller has to see to KV state of the
        old weights.

        Raises:
            ValueError: If weights are unknown, missing or wrongly shaped.
        """
        shapes = expected_shapes(self.model_config.hf_config, self.model_config.trust_remote_code)
        self._rollout_reload(checked_weights(weights, shapes))

    def rollout_load_file(self, path: str) -> None:
        """Take the whole model from a file of `weights_in_memory`, as `rollout_load_weights` does.

        The sender has checked names and shapes.
        """
        with safe_open(path, "pt") as file:
            self._rollout_reload((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def _rollout_reload(self, weights: Pairs) -> None:
        """Load the weights by vLLM's layer-wise reload.

        A plain copy into the parameters would be wrong for two reasons:

        - vLLM merges and repacks matrices when it loads them. It joins q, k and v into one, and on CPU it
          drops the original of matrices in oneDNN's own layout. The layer-wise reload builds each layer anew
          and keeps the storage that is in use.
        - With tied embeddings that reload never sees a tensor for `lm_head`. On CPU the head's packed copy
          would silently stay that of the old weights, so it is packed again here.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        worker: Any = self
        model = worker.model_runner.get_model()
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights)
            finally:  # also after an error, because the model lies on the meta device until then
                finalize_layerwise_reload(model, worker.model_config)
            _repack_tied_head(model)


@contextmanager
def weights_in_memory(weights: Pairs) -> Iterator[Path]:
    """Write the whole model to a file that vLLM's worker processes on this machine read, and yield its path.

    The file lies in /dev/shm where there is one, so that the processes share one copy of the weights. It is
    deleted at the end.
    """
    shared_memory = Path("/dev/shm")
    with weights_in_folder(weights, shared_memory if shared_memory.is_dir() else None) as folder:
        (file,) = folder.iterdir()
        yield file


def expected_shapes(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter that a full set of weights must have.

    A tied `lm_head.weight` is not among them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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
