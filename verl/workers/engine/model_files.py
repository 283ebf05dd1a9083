"""What a model is: decided once, from the files of its folder, for everything that asks.

    headers of *.safetensors + config.json -> ModelFiles.settle(config) -> the one configuration

Trainer, engines, servers, plan, LoRA and export read that configuration (`load_hf_config`). config.json says
how a model is built; the files say what there is. Where they disagree about the vocabulary, the layers or the
width, nothing can be right, and it is an error. Where they disagree about the head (is it the embedding, or a
matrix of its own?) the files decide, a line says so, and checkpoints have it right.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from verl.sessions.engine_contract import TIED_HEAD
from verl.utils.safetensors_file import Shapes, dtypes_and_shapes_in, weight_files

# Families whose names of parameters are known. Others may have layers that are not part of the model proper.
_KNOWN = ("qwen2", "qwen3", "llama", "mistral", "gemma3", "gemma3_text")
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?embed_tokens\.weight")


@dataclass(frozen=True)
class ModelFiles:
    """The facts about a model that the headers of its files hold.

    Attributes:
        folder: the folder.
        shapes: the shape of each tensor.
        dtype: the floating dtype that most numbers of the model have.
    """

    folder: Path
    shapes: Shapes
    dtype: torch.dtype | None

    @classmethod
    def read(cls, folder: Path) -> ModelFiles | None:
        """Read the headers of *.safetensors in a folder; return None if there are none.

        Raises ValueError if a file can't be read or is missing.
        """
        if not any(folder.glob("*.safetensors*")):
            return None
        stamps = tuple(
            (str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder)
        )
        return _read(folder, stamps)

    @property
    def embedding(self) -> str | None:
        """Return the name of the embedding matrix, or None if its name is not known."""
        return next((name for name in sorted(self.shapes) if _EMBEDDING.fullmatch(name)), None)

    def is_tied(self, config_says: bool) -> bool:
        """Return whether the head is the embedding; `config_says` counts where the files leave it open."""
        embedding = self.embedding
        if embedding is None or not embedding.startswith(("model.", "language_model.")):
            return config_says  # a backbone, which has no head
        if TIED_HEAD not in self.shapes:
            return True
        return config_says and _are_equal(self.folder, embedding)

    def settle(self, config: PretrainedConfig) -> None:
        """Check the configuration against the files, and put the tied head right, in place.

        Raises ValueError, in one line, if the files have weights of another shape than the configuration.
        """
        text = config.get_text_config()
        if config.model_type not in _KNOWN:
            return
        layers = {int(match.group(1)) for match in map(_LAYER.match, self.shapes) if match}
        if layers and (len(layers) != text.num_hidden_layers or max(layers) + 1 != text.num_hidden_layers):
            raise self._disagreement(f"{len(layers)} layers", f"num_hidden_layers={text.num_hidden_layers}")
        if self.embedding is not None:
            rows, width = self.shapes[self.embedding]
            if rows != text.vocab_size:
                raise self._disagreement(f"{rows} rows in {self.embedding}", f"vocab_size={text.vocab_size}")
            if width != text.hidden_size:
                raise self._disagreement(
                    f"{width} columns in {self.embedding}", f"hidden_size={text.hidden_size}"
                )
        says = bool(config.tie_word_embeddings)
        is_tied = self.is_tied(says)
        if is_tied != says:
            fact = "no lm_head.weight" if is_tied else "an lm_head.weight that is not the embedding"
            _say_once(
                f"note: {self.folder} has {fact}, and its config.json says tie_word_embeddings={says}: the "
                f"files decide, it is read as tie_word_embeddings={is_tied}, and checkpoints say so"
            )
            config.tie_word_embeddings = is_tied
            text.tie_word_embeddings = is_tied

    def _disagreement(self, found: str, expected: str) -> ValueError:
        return ValueError(
            f"Model {self.folder}: found {found}; expected {expected} (config.json, override_config). Put "
            "config.json right, or the files that belong to it."
        )


@cache
def _read(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> ModelFiles:
    """Read the headers; the second argument changes when the files do."""
    shapes: Shapes = {}
    numbers: Counter[torch.dtype] = Counter()
    for name, (dtype, shape) in dtypes_and_shapes_in(folder).items():
        shapes[name] = shape
        if dtype is not None and dtype.is_floating_point:
            numbers[dtype] += torch.Size(shape).numel()
    dtype = numbers.most_common(1)[0][0] if numbers else None
    return ModelFiles(folder, shapes, dtype)


@cache
def _are_equal(folder: Path, embedding: str) -> bool:
    """Return whether the matrix of the head has the numbers of the embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            names = set(file.keys()) & {embedding, TIED_HEAD}
            tensors |= {name: file.get_tensor(name) for name in names}
    return torch.equal(tensors[embedding], tensors[TIED_HEAD])


@cache
def _say_once(line: str) -> None:
    print(line, flush=True)


def stored_dtype(folder: str | Path) -> torch.dtype | None:
    """Return the dtype of the weights in a local folder, or None where that is not known."""
    files = ModelFiles.read(Path(folder).expanduser())
    return None if files is None else files.dtype
