"""Models on megatron-core: tensor, pipeline, sequence and context parallel, on CUDA or CPU.

    Hugging Face folder --weights--> the stage of this process --model--> numbers per loss token

`parallel_state` says which process holds what, `settings` what a model is made of (and refuses what does not
fit), `model` builds it from `layers`, `weights` names its parameters as Hugging Face does, and `cpu_support`
is what Megatron lacks on a CPU. This file imports nothing of Megatron, so that `check_installed` can be asked
before a run starts.
"""

from __future__ import annotations

import importlib.util
import warnings

INSTALL = 'pip install -c constraints.txt -e ".[megatron]"'

# What Megatron says at import about packages that this project does not use.
for _package in ("Transformer Engine and Apex are", "Apex is"):
    warnings.filterwarnings("ignore", message=f"{_package} not installed", category=UserWarning)
# What torch says about the names that Megatron calls its collectives by.
warnings.filterwarnings("ignore", message=".torch.distributed.[a-z_]*. is deprecated", category=FutureWarning)


def check_installed() -> None:
    """Raises ValueError, with the command that helps, if megatron-core is not installed."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError(
            f"strategy=megatron needs the package megatron-core, which is not installed; run `{INSTALL}`."
        )
