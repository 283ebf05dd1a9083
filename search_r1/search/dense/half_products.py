"""Products of float16 rows with one query, in float32, as fast as memory gives the rows.

torch would first write the rows in float32 to memory. Here the CPU widens them in its registers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from search_r1.search.compiled import jit


def can_widen() -> bool:
    """Return whether this CPU has an instruction that turns float16 into float32."""
    has_instruction = llvmlite.binding.get_host_cpu_features().get("f16c", False)
    return has_instruction or platform.machine() in ("aarch64", "arm64")


@intrinsic
def _widen(typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the float32 of a float16 that is given as a uint16, because numba has no float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@partial(jit, fastmath=("reassoc", "contract", "nsz"))
def half_products(rows, query, products):
    """Write the products of rows [N, D] (float16 seen as uint16) with a query [D] float32 to float32 [N]."""
    for i in range(len(rows)):
        row = rows[i]
        total = np.float32(0)
        for j in range(len(query)):
            total += _widen(row[j]) * query[j]  # type: ignore[call-arg]  # numba gives the context
        products[i] = total
