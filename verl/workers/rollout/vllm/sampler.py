"""The sampler of vLLM's V1 runner in our engines: the native engine's own, in the place of vLLM's.

    logits of the batch, its requests -> uniform(seed, k) of each row -> `draw` -> token, two log-probs

A session's next turn is a new request. vLLM would seed its generator anew and repeat the numbers of the turn
before. It would also draw row by row, with a generator on the host for each. Here a row's number is a hash of
the session's seed and of k, the number of tokens that were drawn with it before, computed for all rows at
once. k is the number of the sequence's tokens plus the request's `draw_offset` (`sampling_arguments`). A
drawn token depends on these two alone, and not on the batch, on how the session was cut into requests, or on
preemption. Of a request's parameters only temperature, top-k, top-p and min-p are used. A request without a
seed gets a hash of its name, the same in all workers, and counts positions.

There are two log-probs: that of the distribution that was sampled from, and that of the model itself
(temperature 1, no truncation). They are kept in `steps` for an engine in this process. Requests with
`logprobs=1`, which come from elsewhere, get them as vLLM's answer. The second one takes the place of the
runner-up, under a token id that no token has: the vocabulary's size.

No step waits for the GPU here, and no step needs tokens that the host does not know yet. vLLM may therefore
schedule the next step meanwhile (asynchronous scheduling).
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from verl.utils.device import HostCopy
from verl.workers.rollout.sampler import SamplingRows, draw_in_pieces, uniforms
from verl.workers.rollout.vllm import DRAW_OFFSET, SESSION_SEED

_MASK = 0xFFFFFFFFFFFFFFFF


class SessionSampler(Sampler):
    """The replacement of `runner.sampler` in vLLM's V1 model runner.

    Attributes:
        steps: The steps whose results an engine in this process has not taken yet, the oldest first. Each has
            the names of its A requests, in order, and float64 [3, A]: their tokens and both log-probs as
            above.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode=runner.sampler.logprobs_mode)
        self._batch = runner.input_batch
        self._requests = runner.requests
        self._names: list[str] = []
        self.steps: deque[tuple[list[str], HostCopy]] = deque(maxlen=2)  # two are under way at most

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample like vLLM's `forward`, for logits [A, V] of the batch's A requests."""
        names = self._batch.req_ids[: len(logits)]
        if names != self._names:
            self._names = names
            requests = {name: self._requests[name].sampling_params for name in names}
            self._rows, self._seeds, self._offsets = _choices(requests)
        num_tokens = self._batch.num_tokens_no_spec[: len(names)].astype(np.int64)
        self._rows.uniform = uniforms(self._seeds, (num_tokens + self._offsets).astype(np.uint64))
        tokens, sampled_from, model_log_probs = draw_in_pieces(logits, self._rows)
        answer = None
        if sampling_metadata.max_num_logprobs:
            ids = torch.stack((tokens, torch.full_like(tokens, logits.shape[1])), 1)
            log_probs = torch.stack((sampled_from, model_log_probs), 1)
            answer = LogprobsTensors(ids.to(torch.int32), log_probs, torch.zeros_like(tokens))
        else:
            self.steps.append(
                (names, HostCopy(torch.stack((tokens.double(), sampled_from, model_log_probs))))
            )
        return SamplerOutput(tokens.to(torch.int32)[:, None], answer)


def _choices(requests: dict[str, Any]) -> tuple[SamplingRows, np.ndarray, np.ndarray]:
    """Return the rows' sampling choices, their seeds as uint64 [A] and their offsets as int64 [A].

    Args:
        requests: vLLM's sampling parameters by the names of the requests.
    """
    values = [(p.temperature, max(p.top_k, 0), p.top_p, p.min_p) for p in requests.values()]
    temperature, top_k, top_p, min_p = (np.array(column, np.float64) for column in zip(*values, strict=True))
    seeds = [
        (p.extra_args or {}).get(SESSION_SEED, zlib.crc32(name.encode())) & _MASK
        for name, p in requests.items()
    ]
    rows = SamplingRows(temperature, top_k.astype(np.int64), top_p, min_p, temperature)
    offsets = [(p.extra_args or {}).get(DRAW_OFFSET, 0) for p in requests.values()]
    return rows, np.array(seeds, np.uint64), np.array(offsets, np.int64)
