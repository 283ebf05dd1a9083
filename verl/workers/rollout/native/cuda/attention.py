"""`AttentionBackend` for CUDA: paged decode and packed prefill, by the fastest kernels that are there.

    StepBatch --plan--> CudaPlan (device tensors, one copy for all) --attend, once per layer--> [T, H * D]

Decode reads the pools in place: by torch's or flash-attn's paged kernels where they work for these pools (see
`kernels.py`), else by our own. Prefill of whole prompts takes the new keys as they are; spans that go on from
earlier ones gather theirs from the pool first. Where no library kernel serves (float32, a softcap), prefill
runs on our own paged kernel too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.cuda.kernels import Geometry, find_decode, find_prefill
from verl.workers.rollout.native.cuda.staging import upload
from verl.workers.rollout.native.cuda.triton_attention import Tiles, paged_attention, tile_tokens
from verl.workers.rollout.native.step_batch import PrefillSpan, StepBatch

logger = logging.getLogger(__name__)
_MAX_SPLITS = 32
_SPLIT_POSITIONS = 128  # a split reads at least so many positions
_PROGRAMS_PER_PROCESSOR = 4  # that decode aims at, to keep the memory busy


@dataclass(frozen=True)
class Packed:
    """Prefill spans for a varlen kernel: where each begins among the new tokens and among its keys (int32
    [S + 1] each), the longest (queries, keys), and where in the flat pool the keys are (int64 [K]); `places`
    is None if all keys are new, that is the rows themselves."""

    ends: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    places: Tensor | None


@dataclass(frozen=True)
class CudaPlan:
    """Rows 0 .. D - 1 decode: `lengths` int32 [D] positions each; `decode` says the same to our own kernel,
    which reads the keys in `num_splits` parts. The rest are prefill spans, None if there are none."""

    lengths: Tensor
    decode: Tiles
    num_splits: int
    prefill: Packed | Tiles | None


class CudaAttention:
    """Our attention on one CUDA device, for one model's heads and one pool's blocks."""

    def __init__(self, geometry: Geometry, softcap: float | None) -> None:
        self._geometry = geometry
        self._group = geometry.num_heads // geometry.num_kv_heads
        is_cuda = geometry.device.type == "cuda"
        self._num_processors = (
            torch.cuda.get_device_properties(geometry.device).multi_processor_count if is_cuda else 1
        )
        decode, prefill = find_decode(geometry, softcap), find_prefill(geometry, softcap)
        self._decode_kernel = decode[1] if decode else None
        self._prefill_kernel = prefill[1] if prefill else None
        logger.info(
            "rollout attention: decode by %s, prefill by %s",
            decode[0] if decode else "our paged kernel",
            prefill[0] if prefill else "our paged kernel",
        )

    def plan(self, batch: StepBatch) -> CudaPlan:
        """One copy to the device for everything that attention needs to know of a step."""
        return self.plan_on_device(batch.spans, upload(self.plan_arrays(batch), self._geometry.device))

    def plan_arrays(self, batch: StepBatch) -> dict[str, np.ndarray]:
        """What `plan_on_device` wants on the device, so that it may travel with other arrays."""
        decode = {
            "tables": batch.decode_tables.astype(np.int32),
            "lengths": batch.decode_lengths.astype(np.int32),
            "last": batch.decode_lengths.astype(np.int32) - 1,
            "rows": np.arange(batch.num_decode, dtype=np.int32),
            "ones": np.ones(batch.num_decode, dtype=np.int32),
        }
        if not batch.spans:
            return decode
        if self._prefill_kernel is None:
            return decode | self._tile_arrays(batch.spans)
        return decode | self._packed_arrays(batch.spans)

    def plan_on_device(self, spans: Sequence[PrefillSpan], arrays: dict[str, Tensor]) -> CudaPlan:
        """The plan from `plan_arrays`, once they are on the device (others may be among them)."""
        prefill: Packed | Tiles | None = None
        if spans and self._prefill_kernel is None:
            prefill = Tiles(
                arrays["tile_first"],
                arrays["tile_count"],
                arrays["tile_position"],
                arrays["tile_sequence"],
                arrays["tile_tables"],
                max_count=tile_tokens(self._group),
            )
        elif spans:
            prefill = Packed(
                ends=(arrays["query_ends"], arrays["key_ends"]),
                longest=(
                    max(span.count for span in spans),
                    max(span.start + span.count for span in spans),
                ),
                places=arrays.get("key_places"),
            )
        rows = arrays["rows"]
        decode = Tiles(rows, arrays["ones"], arrays["last"], rows, arrays["tables"], max_count=1)
        return CudaPlan(arrays["lengths"], decode, self._num_splits(len(rows), arrays["tables"]), prefill)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: CudaPlan,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        num_decode = len(plan.lengths)
        parts = []
        if num_decode:
            parts.append(
                self._decode(
                    query[:num_decode], keys, values, plan, window=window, softcap=softcap, scale=scale
                )
            )
        new = slice(num_decode, None)
        if isinstance(plan.prefill, Tiles):
            out = torch.empty_like(query[new])
            paged_attention(
                query[new], keys, values, plan.prefill, out, window=window, softcap=softcap, scale=scale
            )
            parts.append(out)
        elif plan.prefill is not None:
            assert self._prefill_kernel is not None
            own_key, own_value = key[new], value[new]
            if plan.prefill.places is not None:
                own_key = keys.flatten(0, 1).index_select(0, plan.prefill.places)
                own_value = values.flatten(0, 1).index_select(0, plan.prefill.places)
            parts.append(
                self._prefill_kernel(
                    query[new],
                    own_key,
                    own_value,
                    plan.prefill.ends,
                    plan.prefill.longest,
                    window=window,
                    softcap=softcap,
                    scale=scale,
                )
            )
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _num_splits(self, num_sequences: int, tables: Tensor) -> int:
        """So many parts that few sequences keep the whole device busy too."""
        programs = max(1, num_sequences) * self._geometry.num_kv_heads
        wanted = -(-_PROGRAMS_PER_PROCESSOR * self._num_processors // programs)
        longest = tables.shape[1] * self._geometry.block_size
        most = max(1, min(wanted, longest // _SPLIT_POSITIONS, _MAX_SPLITS))
        return 1 << (most.bit_length() - 1)  # a kernel is compiled for each number

    def _decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: CudaPlan,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        if self._decode_kernel is not None:
            return self._decode_kernel(
                query,
                keys,
                values,
                plan.decode.tables,
                plan.lengths,
                window=window,
                softcap=softcap,
                scale=scale,
            )
        out = torch.empty_like(query)
        paged_attention(
            query,
            keys,
            values,
            plan.decode,
            out,
            window=window,
            softcap=softcap,
            scale=scale,
            num_splits=(
                plan.num_splits
                if window is None
                else max(1, min(plan.num_splits, window // _SPLIT_POSITIONS))
            ),
        )
        return out

    def _packed_arrays(self, spans: Sequence[PrefillSpan]) -> dict[str, np.ndarray]:
        counts = np.array([span.count for span in spans])
        lengths = np.array([span.start + span.count for span in spans])
        arrays = {
            "query_ends": np.concatenate(([0], counts.cumsum())).astype(np.int32),
            "key_ends": np.concatenate(([0], lengths.cumsum())).astype(np.int32),
        }
        if any(span.start for span in spans):
            size = self._geometry.block_size
            positions = [np.arange(length) for length in lengths]
            arrays["key_places"] = np.concatenate(
                [
                    span.table[where // size].astype(np.int64) * size + where % size
                    for span, where in zip(spans, positions, strict=True)
                ]
            )
        return arrays

    def _tile_arrays(self, spans: Sequence[PrefillSpan]) -> dict[str, np.ndarray]:
        size = tile_tokens(self._group)
        begins = [np.arange(0, span.count, size) for span in spans]  # of the tiles within each span
        first = spans[0].first  # prefill rows follow the decode rows; `attend` counts from there
        tables = np.zeros((len(spans), max(len(span.table) for span in spans)), dtype=np.int32)
        for row, span in zip(tables, spans, strict=True):
            row[: len(span.table)] = span.table
        pairs = list(zip(spans, begins, strict=True))
        arrays = {
            "first": [span.first - first + begin for span, begin in pairs],
            "count": [np.minimum(span.count - begin, size) for span, begin in pairs],
            "position": [span.start + begin for span, begin in pairs],
            "sequence": [np.full(len(begin), index) for index, begin in enumerate(begins)],
        }
        return {
            "tile_tables": tables,
            **{f"tile_{name}": np.concatenate(parts).astype(np.int32) for name, parts in arrays.items()},
        }
