"""Models on megatron-core: tensor, pipeline, sequence and context parallel, on CUDA or CPU.

    Hugging Face folder --weights--> the stage of this process --model--> numbers per loss token

- `parallel_state` says which process holds which part of a model.
- `settings` describes the sizes of a model, and refuses what does not fit.
- `model` builds the model from `layers`.
- `weights` names the model's parameters as Hugging Face does.
- `cpu_support` supplies what Megatron lacks on a CPU.

This file imports nothing of Megatron, so that `check_installed` can be called before a run starts.
"""

from __future__ import annotations

import importlib.util
import warnings

INSTALL = 'pip install -c constraints.txt -e ".[megatron]"'

# Megatron warns at import about packages that this project does not use.
for _package in ("Transformer Engine and Apex are", "Apex is"):
    warnings.filterwarnings("ignore", message=f"{_package} not installed", category=UserWarning)
# torch warns about the names that Megatron calls its collectives by.
warnings.filterwarnings("ignore", message=".torch.distributed.[a-z_]*. is deprecated", category=FutureWarning)


def check_installed() -> None:
    """Check that megatron-core is installed.

    Raises ValueError, with the command that installs it, if it is not.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError(
            f"strategy=megatron needs the package megatron-core, which is not installed; run `{INSTALL}`."
        )
