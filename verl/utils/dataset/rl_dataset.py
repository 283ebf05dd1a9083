"""`from verl.utils.dataset.rl_dataset import RLHFDataset`, as in verl; the code is in `verl.data`."""

from verl.data.rl_dataset import RLHFDataset

__all__ = ["RLHFDataset"]
