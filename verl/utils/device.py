"""verl's name for the device that a process computes on."""

import torch


def get_device_name() -> str:
    """ "cuda" where there is a CUDA device, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
