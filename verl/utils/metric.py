"""verl's `reduce_metrics`, for users' own training loops."""

from __future__ import annotations

from typing import Any

import numpy as np


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Each list becomes its maximum if its name holds "max", minimum if "min", else mean; in place."""
    for name, values in metrics.items():
        if "max" in name:
            metrics[name] = np.max(values)
        elif "min" in name:
            metrics[name] = np.min(values)
        else:
            metrics[name] = np.mean(values)
    return metrics
