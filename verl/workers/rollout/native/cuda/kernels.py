"""Which attention kernels this installation has for our pools, found by trying them once.

Two jobs: `Decode` reads one token's keys from the pools by block table, `Prefill` takes packed keys. For both
the candidates are torch's varlen attention and flash-attn. Whether they run depends on versions, on the
block size (flash-attn 2 pages by multiples of 256; torch's paged varlen wants FlashAttention 3), on dtype and
head size, so each candidate has to give the right answer on a small random problem before it is taken.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.workers.rollout.native.attention import masked_attention


@dataclass(frozen=True)
class Geometry:
    """What a kernel has to cope with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


class Decode(Protocol):
    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        """query [D, num_heads, head_dim], pools, tables int32 [D, M], lengths int32 [D] -> like query."""


class Prefill(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        """query [T, num_heads, head_dim], key and value [K, num_kv_heads, head_dim] -> like query.

        ends: int32 [S + 1] of queries and of keys, where sequences begin and end, from 0; longest: the same
        for the longest one. The last query of a sequence stands at its last key; causal.
        """


def find_decode(geometry: Geometry, softcap: float | None) -> tuple[str, Decode] | None:
    """The first candidate that is right, and its name."""
    return _first_right(_decode_candidates(), lambda kernel: _decode_is_right(kernel, geometry, softcap))


def find_prefill(geometry: Geometry, softcap: float | None) -> tuple[str, Prefill] | None:
    """The first candidate that is right, and its name."""
    return _first_right(_prefill_candidates(), lambda kernel: _prefill_is_right(kernel, geometry, softcap))


def _first_right(candidates: Iterator[tuple[str, Any]], is_right: Callable[[Any], bool]) -> Any:
    for name, kernel in candidates:
        try:
            if is_right(kernel):
                return name, kernel
        except Exception:  # each version refuses in its own way what it can't do; then it is not taken
            continue
    return None


def _varlen_attn() -> tuple[Callable[..., Any], frozenset[str]] | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:  # torch < 2.10
        return None
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _flash_attn() -> Any:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    import flash_attn

    return flash_attn


def _decode_candidates() -> Iterator[tuple[str, Decode]]:
    varlen = _varlen_attn()
    if varlen is not None and {"window_size", "block_table", "seqused_k", "enable_gqa"} <= varlen[1]:
        yield "torch varlen_attn, paged", _torch_decode(varlen[0])
    flash = _flash_attn()
    if flash is not None:
        yield "flash-attn, paged", _flash_decode(flash)


def _prefill_candidates() -> Iterator[tuple[str, Prefill]]:
    varlen = _varlen_attn()
    if varlen is not None and {"window_size", "scale"} <= varlen[1]:
        yield "torch varlen_attn", _torch_prefill(varlen[0], "enable_gqa" in varlen[1])
    flash = _flash_attn()
    if flash is not None:
        yield "flash-attn", _flash_prefill(flash)


def _torch_decode(varlen_attn: Callable[..., Any]) -> Decode:
    def decode(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        if softcap is not None:
            raise NotImplementedError("varlen_attn has no softcap")
        ends = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        longest = tables.shape[1] * keys.shape[1]
        return varlen_attn(
            query,
            keys,
            values,
            ends,
            None,
            1,
            longest,
            scale=scale,
            window_size=_window_size(window),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=tables,
        )

    return decode


def _flash_decode(flash_attn: Any) -> Decode:
    def decode(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        out = flash_attn.flash_attn_with_kvcache(
            query[:, None],
            keys,
            values,
            cache_seqlens=lengths,
            block_table=tables,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            softcap=softcap or 0.0,
        )
        return out[:, 0]

    return decode


def _torch_prefill(varlen_attn: Callable[..., Any], names_gqa: bool) -> Prefill:
    gqa = {"enable_gqa": True} if names_gqa else {}

    def prefill(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        if softcap is not None:
            raise NotImplementedError("varlen_attn has no softcap")
        return varlen_attn(
            query, key, value, *ends, *longest, scale=scale, window_size=_window_size(window), **gqa
        )

    return prefill


def _flash_prefill(flash_attn: Any) -> Prefill:
    def prefill(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        *,
        window: int | None,
        softcap: float | None,
        scale: float,
    ) -> Tensor:
        return flash_attn.flash_attn_varlen_func(
            query,
            key,
            value,
            *ends,
            *longest,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            softcap=softcap or 0.0,
        )

    return prefill


def _window_size(window: int | None) -> tuple[int, int]:
    """(positions to the left, to the right) besides the token's own; -1 = all."""
    return (-1 if window is None else window - 1, 0)


def _random(geometry: Geometry, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # on CPU: the device's own random state stays as it is
    return torch.randn(*shape, generator=generator).to(geometry.device, geometry.dtype)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return error < 1e-2  # rounding of bfloat16; false for NaN


def _decode_is_right(kernel: Decode, geometry: Geometry, softcap: float | None) -> bool:
    size, heads = geometry.block_size, (geometry.num_kv_heads, geometry.head_dim)
    keys, values = _random(geometry, 2, 4, size, *heads)
    query = _random(geometry, 2, geometry.num_heads, geometry.head_dim)
    tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=geometry.device)
    lengths = torch.tensor([size + size // 2, size], dtype=torch.int32, device=geometry.device)
    for window in (None, size // 2):
        options = {"window": window, "softcap": softcap, "scale": geometry.head_dim**-0.5}
        expected = masked_attention(
            query[:, None],
            keys[tables.long()].flatten(1, 2),
            values[tables.long()].flatten(1, 2),
            lengths[:, None].long() - 1,
            **options,
        )[:, 0]
        if not _is_close(kernel(query, keys, values, tables, lengths, **options), expected):
            return False
    return True


def _prefill_is_right(kernel: Prefill, geometry: Geometry, softcap: float | None) -> bool:
    counts, lengths = (5, 9), (5, 20)  # a whole prompt, and the end of a longer sequence
    query = _random(geometry, sum(counts), geometry.num_heads, geometry.head_dim)
    key, value = _random(geometry, 2, sum(lengths), geometry.num_kv_heads, geometry.head_dim)
    ends = tuple(
        torch.tensor([0, first, first + second], dtype=torch.int32, device=geometry.device)
        for first, second in (counts, lengths)
    )
    for window in (None, 7):
        options = {"window": window, "softcap": softcap, "scale": geometry.head_dim**-0.5}
        expected = [
            masked_attention(
                q[None],
                k[None],
                v[None],
                torch.arange(len(k) - len(q), len(k), device=q.device)[None],
                **options,
            )[0]
            for q, k, v in zip(query.split(counts), key.split(lengths), value.split(lengths), strict=True)
        ]
        found = kernel(query, key, value, (ends[0], ends[1]), (max(counts), max(lengths)), **options)
        if not _is_close(found, torch.cat(expected)):
            return False
    return True
