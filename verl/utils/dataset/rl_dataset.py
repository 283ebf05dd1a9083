"""`RLHFDataset` where verl has it, with verl's arguments; the code is in `verl.data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.data import rl_dataset

__all__ = ["RLHFDataset"]


class RLHFDataset(rl_dataset.RLHFDataset):
    """The rows of runs, from the arguments of verl 0.9 or of Search-R1's verl.

    Args:
        data_files: a file or several; `parquet_files` is Search-R1's name for them.
        tokenizer: see `verl.data.rl_dataset.RLHFDataset`.
        config: the `data` block. As in verl, its `shuffle` and `seed` say which rows `max_samples` takes.
        processor: must be None, because images and videos are not read.
        max_samples: use this many rows at most, the first ones, or with config.shuffle drawn ones. 0 and
            below stand for all.
        settings: the settings of the `data` block one by one, as Search-R1's verl takes them.

    Raises:
        ValueError: there is a processor, or files or settings are given twice, or no files.
    """

    def __init__(
        self,
        data_files: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        **settings: Any,
    ) -> None:
        if processor is not None:
            raise ValueError("processor: found one, expected None; images and videos are not read.")
        given = [files for files in (data_files, settings.pop("parquet_files", None)) if files is not None]
        if len(given) != 1:
            raise ValueError(f"Found {len(given)} of data_files and parquet_files; expected one of them.")
        if config is not None and settings:
            raise ValueError(f"Found a config and {', '.join(settings)}; expected the one or the other.")
        block = settings if config is None else config
        super().__init__(given[0], tokenizer, block)
        if 0 < max_samples < len(self):
            chosen = np.arange(max_samples)
            if block.get("shuffle", False):
                random = np.random.default_rng(block.get("seed"))
                chosen = random.choice(len(self), size=max_samples, replace=False)
            self.rows = [self.rows[row] for row in chosen]
            self.places = [self.places[row] for row in chosen]
