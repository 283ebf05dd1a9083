"""Functions that are compiled by numba at their first call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numba


def jit(function: Callable[..., Any], fastmath: Collection[str] = ()) -> Callable[..., Any]:
    """Compile a function at its first call, which takes some seconds. It then runs without the GIL.

    The machine code is kept beside the source or in the user's cache folder. `fastmath` names the liberties
    with float sums that LLVM may take.
    """
    liberties = set(fastmath)
    try:
        return numba.njit(nogil=True, cache=True, fastmath=liberties)(function)
    except RuntimeError:  # "no locator available": neither folder can be written to
        return numba.njit(nogil=True, fastmath=liberties)(function)
