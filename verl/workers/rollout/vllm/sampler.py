"""vLLM's sampler with two additions: random numbers per (seed, position), and the model's own log-prob.

vLLM gives a request a generator of its own when it has a seed. A session's next turn is a new request, whose
generator would start again and repeat the numbers of the turn before; and on CPU a seeded request whose
prompt is computed in chunks fails (vLLM 0.32). So requests come without vLLM's seed and with
`extra_args={"session_seed": ...}`; before each draw, a generator is seeded with a hash of the session's seed
and the position of the token to come. What is drawn then depends on these two alone: not on the batch, not
on how the session was cut into requests, nor on preemption.

vLLM returns log-probs either before or after temperature and truncation. Ours come after
(`logprobs_mode=processed_logprobs`), and a request with `logprobs=1` gets the model's own (temperature 1, no
truncation) in the place of the runner-up, under a token id that no token has: the vocabulary's size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from verl.workers.rollout.vllm import SESSION_SEED

_MASK = 0xFFFFFFFFFFFFFFFF


class SessionSampler(Sampler):
    """Takes the place of `runner.sampler` in vLLM's V1 model runner; needs synchronous scheduling."""

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode=runner.sampler.logprobs_mode)
        self._batch = runner.input_batch
        self._requests = runner.requests
        self._generators = [torch.Generator(runner.device) for _ in range(self._batch.max_num_reqs)]
        self._devices = [runner.device] if runner.device.type == "cuda" else []
        self._both = False  # this step's requests get two log-probs
        self._plain: Tensor | None = None  # [A, V], where some row's differ

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, for logits [A, V] of the batch's A requests."""
        requests = [self._requests[name].sampling_params for name in self._batch.req_ids[: logits.shape[0]]]
        metadata = dataclasses.replace(sampling_metadata, generators=self._seeded(requests))
        self._both = metadata.max_num_logprobs == 1
        differs = self._both and any(map(_changes_distribution, requests))
        self._plain = logits.log_softmax(-1, dtype=torch.float32) if differs else None
        with torch.random.fork_rng(self._devices):  # vLLM draws from the process's generators: the trainer's
            return super().forward(logits, metadata, *args, **kwargs)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """The sampled token's log-prob, and beside it the model's own; vLLM's answer for other requests."""
        if not self._both:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        token_ids = token_ids.unsqueeze(-1)
        sampled_from = logprobs.gather(-1, token_ids)
        own = sampled_from if self._plain is None else self._plain.gather(-1, token_ids)
        ids = torch.cat((token_ids, torch.full_like(token_ids, logprobs.shape[-1])), 1)
        ranks = torch.zeros_like(token_ids[:, 0])
        return LogprobsTensors(ids.to(torch.int32), torch.cat((sampled_from, own), 1), ranks)

    def _seeded(self, requests: list[Any]) -> dict[int, torch.Generator]:
        """The generators of rows that are sampled, each set to its session's seed and position."""
        generators = {}
        for row, (params, length) in enumerate(
            zip(requests, self._batch.num_tokens_no_spec[: len(requests)].tolist(), strict=True)
        ):
            seed = (params.extra_args or {}).get(SESSION_SEED)
            if seed is not None and params.temperature > 0.0:
                generators[row] = self._generators[row]
                generators[row].manual_seed(mix(seed, length))
        return generators


def _changes_distribution(params: Any) -> bool:
    """True if a vLLM request is sampled from another distribution than the model's own."""
    if params.temperature == 0.0:
        return False
    return params.temperature != 1.0 or params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def mix(seed: int, position: int) -> int:
    """63 random-looking bits of a seed and a position (splitmix64: Steele, Lea and Flood, 2014)."""
    return _splitmix64(_splitmix64(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) >> 1


def _splitmix64(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
