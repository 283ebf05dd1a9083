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

from verl.workers.rollout.vllm.requests import SESSION_SEED

_MASK = 0xFFFFFFFFFFFFFFFF


class SessionSampler(Sampler):
    """Takes the place of `runner.sampler` in vLLM's V1 model runner; needs synchronous scheduling."""

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode=runner.sampler.logprobs_mode)
        self._batch = runner.input_batch
        self._requests = runner.requests
        self._generators = [torch.Generator(runner.device) for _ in range(self._batch.max_num_reqs)]
        self._plain: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, for logits [A, V] of the batch's A requests."""
        metadata = dataclasses.replace(sampling_metadata, generators=self._seeded(logits.shape[0]))
        if metadata.max_num_logprobs == 1:
            self._plain = logits.log_softmax(-1, dtype=torch.float32)
        state = torch.get_rng_state()  # vLLM draws from the process's generator, which is the trainer's
        try:
            return super().forward(logits, metadata, *args, **kwargs)
        finally:
            torch.set_rng_state(state)
            self._plain = None

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """The sampled token's log-prob, and beside it the model's own; vLLM's answer for other requests."""
        if self._plain is None:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        token_ids = token_ids.unsqueeze(-1)
        both = torch.cat((logprobs.gather(-1, token_ids), self._plain.gather(-1, token_ids)), 1)
        ids = torch.cat((token_ids, torch.full_like(token_ids, logprobs.shape[-1])), 1)
        return LogprobsTensors(ids.to(torch.int32), both, torch.zeros_like(token_ids[:, 0]))

    def _seeded(self, num_rows: int) -> dict[int, torch.Generator]:
        generators = {}
        lengths = self._batch.num_tokens_no_spec[:num_rows].tolist()
        for row, (request_id, length) in enumerate(zip(self._batch.req_ids[:num_rows], lengths, strict=True)):
            extra = self._requests[request_id].sampling_params.extra_args
            if extra is not None and SESSION_SEED in extra:
                self._generators[row].manual_seed(mix(extra[SESSION_SEED], length))
                generators[row] = self._generators[row]
        return generators


def mix(seed: int, position: int) -> int:
    """63 random-looking bits of a seed and a position (splitmix64: Steele, Lea and Flood, 2014)."""
    return _splitmix64(_splitmix64(seed & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) >> 1


def _splitmix64(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
