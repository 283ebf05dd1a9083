"""The function `reduce_metrics` of verl, for your own training loops."""

from __future__ import annotations

from typing import Any

import numpy as np


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Reduce each list to a number, in place.

    The number is the maximum if the name holds "max", the minimum if it holds "min", else the mean.
    """
    for name, values in metrics.items():
        if "max" in name:
            metrics[name] = np.max(values)
        elif "min" in name:
            metrics[name] = np.min(values)
        else:
            metrics[name] = np.mean(values)
    return metrics
