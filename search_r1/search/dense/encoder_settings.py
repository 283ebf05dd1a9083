"""What an encoder does with a text besides running its network: pooling, prefixes, normalisation, lengths.

    model name or folder -> known family (FAMILIES) -> EncoderSettings -> manifest of the index -> the server
                         -> its sentence-transformers files, for what the family leaves open

The builder and the server get their settings from here or from the manifest, never from two tables that may
differ. This file imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

POOLINGS = ("mean", "cls", "last", "max")
WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
BGE_ENGLISH = "Represent this sentence for searching relevant passages: "
BGE_TASK = "<instruct>Given a web search query, retrieve relevant passages that answer the query.\n<query>"
BGE_CHINESE = "为这个句子生成表示以用于检索相关文章："


@dataclass(frozen=True)
class Family:
    """What the model cards of a family say. None: look into the model's own files."""

    pattern: str  # searched in the model's name, in small letters
    pooling: str | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None


FAMILIES = (
    Family(r"\be5.*(instruct|mistral)", None, True, WEB_SEARCH, ""),
    Family(r"\be5\b", "mean", True, "query: ", "passage: "),
    Family(r"\bbge-m3|\bbge.*-noinstruct", "cls", True, "", ""),
    Family(r"\bbge-(code|en-icl|multilingual-gemma)", "last", True, BGE_TASK, ""),  # language models
    Family(r"\bbge.*-zh\b", "cls", True, BGE_CHINESE, ""),
    Family(r"\bbge\b", "cls", True, BGE_ENGLISH, ""),
    Family(r"contriever", "mean", False, "", ""),
    Family(r"\bdpr\b", "cls", False, "", ""),
    Family(r"\bgte\b(?!-qwen)", None, True, "", ""),  # compared by cosine, v1 pools by mean and v1.5 by cls
    Family(r"\bjina-embeddings-v2", "mean", True, "", ""),
    Family(r"nomic-embed-text", "mean", True, "search_query: ", "search_document: "),
)


@dataclass(frozen=True)
class EncoderSettings:
    """How texts become vectors; kept in the manifest of an index.

    `pooling`: one of POOLINGS. `normalize`: vectors of length 1. Prefixes go before the text as they are.
    `max_query_length`, `max_passage_length`: in tokens, special ones included; longer texts are cut.
    `modules`: sentence-transformers Dense layers after the pooling, as folder names in the model.
    """

    name: str
    model: str
    pooling: str
    normalize: bool
    query_prefix: str
    passage_prefix: str
    max_query_length: int
    max_passage_length: int
    modules: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {**asdict(self), "modules": list(self.modules)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EncoderSettings:
        """The settings of a manifest; other keys are left out. Raises ValueError when one is missing."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(
                f"the index's manifest doesn't say the encoder's {', '.join(missing)}: build it again"
            )
        known = {name: values[name] for name in names}
        return cls(**{**known, "modules": tuple(values["modules"])})


def find_family(name: str, model: str) -> Family | None:
    """The family of a model by its own name (last part of the path or hub id), else by `name`."""
    parts = [part for part in re.split(r"[\\/]|--", model.lower()) if part]
    hub_cache = [parts[i - 1] for i, part in enumerate(parts) if part == "snapshots" and i > 0]
    for candidate in (*parts[-1:], *hub_cache, name.lower()):
        words = candidate.replace("_", "-")
        for family in FAMILIES:
            if re.search(family.pattern, words):
                return family
    return None


@dataclass(frozen=True)
class ModelFiles:
    """What a model's sentence-transformers files say; None where they are silent."""

    pooling: str | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    max_length: int | None = None
    modules: tuple[str, ...] = ()


ReadFile = Callable[[str], Path | None]
"""From a file's path inside the model to where it lies on this disk; None when the model doesn't have it."""


def read_model_files(find: ReadFile) -> ModelFiles | None:
    """Reads modules.json and what it names; None for a model without it.

    Raises ValueError for modules that this encoder can't run.
    """
    modules = _read_json(find, "modules.json")
    if modules is None:
        return None
    pooling, normalize, dense = None, False, []
    for module in modules:
        kind, folder = module["type"].rsplit(".", 1)[-1], module.get("path", "")
        if kind == "Pooling":
            pooling = _read_pooling(_read_json(find, f"{folder}/config.json") or {})
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(folder)
        elif kind not in ("Transformer", "Dropout"):
            raise ValueError(
                f"the model has a sentence-transformers module {module['type']}, which is not supported"
            )
    prompts = (_read_json(find, "config_sentence_transformers.json") or {}).get("prompts") or {}
    lengths = _read_json(find, "sentence_bert_config.json") or {}
    return ModelFiles(
        pooling=pooling,
        normalize=normalize,
        query_prefix=_first(prompts, "query", "web_search_query", "retrieval.query"),
        passage_prefix=_first(prompts, "passage", "document", "retrieval.passage"),
        max_length=lengths.get("max_seq_length"),
        modules=tuple(dense),
    )


def _first(prompts: dict[str, str], *names: str) -> str | None:
    return next((prompts[name] for name in names if name in prompts), None)


def _read_json(find: ReadFile, name: str) -> Any:
    path = find(name)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def _read_pooling(config: dict[str, Any]) -> str:
    """The one pooling mode of a Pooling module's config, old form (flags) or new (`pooling_mode`)."""
    flags = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last", "max_tokens": "max"}
    modes = [
        mode.removeprefix("pooling_mode_") for mode, on in config.items() if on is True and "mode_" in mode
    ]
    named = config.get("pooling_mode")
    poolings = [named] if isinstance(named, str) else [flags.get(mode, mode) for mode in modes]
    poolings = ["last" if mode == "lasttoken" else mode for mode in poolings]
    if len(poolings) != 1 or poolings[0] not in POOLINGS:
        raise ValueError(
            f"the model pools by {poolings or 'nothing that it names'}, expected one of {POOLINGS}"
        )
    return poolings[0]


def decide_settings(
    name: str,
    model: str,
    files: ModelFiles | None,
    *,
    pooling: str | None,
    max_query_length: int,
    max_passage_length: int,
) -> tuple[EncoderSettings, list[str]]:
    """The settings of a model, and lines for people about what had to be guessed.

    The user's `pooling` wins over the family, the family over the model's files, these over the defaults
    (mean, no prefixes; normalised, since inner products of unknown lengths mean little).
    """
    family = find_family(name, model) or Family("")
    own = files or ModelFiles()
    notes = []
    pooled = pooling or family.pooling or own.pooling
    if pooled is None:
        pooled = "mean"
        notes.append(f"{model}: nothing says how it pools, so mean is taken; --pooling_method changes it")
    normalize = family.normalize if family.normalize is not None else own.normalize
    if normalize is None:
        normalize = True
        notes.append(f"{model}: nothing says whether its vectors are normalised, so they are")
    longest = own.max_length or max(max_query_length, max_passage_length)
    settings = EncoderSettings(
        name=name,
        model=model,
        pooling=pooled,
        normalize=normalize,
        query_prefix=(family.query_prefix if family.query_prefix is not None else own.query_prefix) or "",
        passage_prefix=(family.passage_prefix if family.passage_prefix is not None else own.passage_prefix)
        or "",
        max_query_length=min(max_query_length, longest),
        max_passage_length=min(max_passage_length, longest),
        modules=own.modules,
    )
    return settings, notes


def settings_of_index(
    values: dict[str, Any], model: str | None, pooling: str | None, max_query_length: int | None
) -> EncoderSettings:
    """The settings in an index's manifest, with the model where it lies on this machine.

    Raises ValueError for a flag that contradicts them.
    """
    settings = EncoderSettings.from_dict(values)
    if pooling is not None and pooling != settings.pooling:
        raise ValueError(
            f"--pooling_method: found {pooling}, but the index was built with {settings.pooling} pooling: "
            "leave the flag out, or build the index again"
        )
    return replace(
        settings,
        model=model or settings.model,
        max_query_length=max_query_length or settings.max_query_length,
    )
