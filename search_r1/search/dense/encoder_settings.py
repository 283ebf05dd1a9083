"""Settings of a text encoder besides its network: pooling, prefixes, normalisation, lengths.

    model name or folder -> known family (FAMILIES) -> EncoderSettings -> manifest of the index -> the server
                         -> its sentence-transformers files, for what the family leaves open

The builder and the server get their settings from here or from the manifest, never from two tables that may
differ. This file imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

POOLINGS = ("mean", "cls", "last", "max")
MAX_LENGTH = 256  # the most tokens of a query or passage, unless the user says otherwise
WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
BGE_ENGLISH = "Represent this sentence for searching relevant passages: "
BGE_TASK = "<instruct>Given a web search query, retrieve relevant passages that answer the query.\n<query>"
BGE_CHINESE = "为这个句子生成表示以用于检索相关文章："


@dataclass(frozen=True)
class EncoderHints:
    """The facts about a model that one source gives. A field is None where the source says nothing."""

    pooling: str | None = None
    normalize: bool | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    max_length: int | None = None


FAMILIES = {
    r"\be5.*(instruct|mistral)": EncoderHints(None, True, WEB_SEARCH, ""),
    r"\be5\b": EncoderHints("mean", True, "query: ", "passage: "),
    r"\bbge-m3|\bbge.*-noinstruct": EncoderHints("cls", True, "", ""),
    r"\bbge-(code|en-icl|multilingual-gemma)": EncoderHints("last", True, BGE_TASK, ""),  # language models
    r"\bbge.*-zh\b": EncoderHints("cls", True, BGE_CHINESE, ""),
    r"\bbge\b": EncoderHints("cls", True, BGE_ENGLISH, ""),
    r"contriever": EncoderHints("mean", False, "", ""),
    r"\bdpr\b": EncoderHints("cls", False, "", ""),
    # Its vectors are compared by cosine. v1 pools by mean and v1.5 by cls.
    r"\bgte\b(?!-qwen)": EncoderHints(None, True, "", ""),
    r"\bjina-embeddings-v2": EncoderHints("mean", True, "", ""),
    r"nomic-embed-text": EncoderHints("mean", True, "search_query: ", "search_document: "),
}
"""Maps a pattern of a model's name, in small letters, to what its card says. The first that fits counts."""


@dataclass(frozen=True)
class EncoderSettings:
    """The settings by which texts become vectors. They are kept in the manifest of an index.

    Prefixes go before the text as they are. Lengths are in tokens, special ones included. Longer texts are
    cut.

    Attributes:
        name: The retriever's name.
        model: The model's hub id or folder.
        pooling: One of POOLINGS.
        normalize: Whether vectors get length 1.
        query_prefix: Goes before a query.
        passage_prefix: Goes before a passage.
        max_query_length: The most tokens of a query.
        max_passage_length: The most tokens of a passage.
    """

    name: str
    model: str
    pooling: str
    normalize: bool
    query_prefix: str
    passage_prefix: str
    max_query_length: int
    max_passage_length: int


def find_family(name: str, model: str) -> EncoderHints | None:
    """Return the family of a model by its own name, else by `name`. Return None if it is not known.

    The model's own name is the last part of the path or hub id.
    """
    segments = [segment for segment in re.split(r"[\\/]|--", model.lower()) if segment]
    hub_cache = [segments[i - 1] for i, segment in enumerate(segments) if segment == "snapshots" and i > 0]
    for candidate in (*segments[-1:], *hub_cache, name.lower()):
        words = candidate.replace("_", "-")
        for pattern, family in FAMILIES.items():
            if re.search(pattern, words):
                return family
    return None


def read_model_files(find: Callable[[str], str | None]) -> EncoderHints:
    """Return what a model's sentence-transformers files say.

    Args:
        find: Returns the path of a file on this machine, or None if there is none.

    Raises:
        ValueError: For modules that this encoder can't run.
    """

    def read(name: str) -> Any:
        path = find(name)
        if path is None:
            return {}
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    modules = read("modules.json")
    if not modules:
        return EncoderHints()
    pooling = None
    normalize = False
    for module in modules:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _read_pooling(read(f"{module['path']}/config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            unsupported = f"a sentence-transformers module {module['type']}, which is not supported"
            raise ValueError(f"the model has {unsupported}")
    prompts = read("config_sentence_transformers.json").get("prompts") or {}
    query_prefix, passage_prefix = (
        next((prompts[name] for name in names if name in prompts), None)
        for names in (
            ("query", "web_search_query", "retrieval.query"),
            ("passage", "document", "retrieval.passage"),
        )
    )
    max_length = read("sentence_bert_config.json").get("max_seq_length")
    return EncoderHints(pooling, normalize, query_prefix, passage_prefix, max_length)


def _read_pooling(config: dict[str, Any]) -> str:
    """Return the one pooling mode of a Pooling module's config.

    The config has the new form (`pooling_mode`) or the old one (flags).
    """
    flags = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
    modes = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    modes += [mode for mode, on in config.items() if on is True and mode.startswith("pooling_mode_")]
    names = [mode.removeprefix("pooling_mode_") for mode in modes]
    poolings = [flags.get(name, name) for name in names]
    if len(poolings) != 1 or poolings[0] not in POOLINGS:
        actual = poolings or "nothing that it names"
        raise ValueError(f"the model pools by {actual}, expected one of {POOLINGS}")
    return poolings[0]


def decide_settings(
    name: str,
    model: str,
    model_hints: EncoderHints,
    pooling: str | None,
    max_query_length: int | None,
    max_passage_length: int | None,
) -> tuple[EncoderSettings, list[str]]:
    """Return the settings of a model, and lines for people about what had to be guessed.

    The user's `pooling` wins over the family, the family over the model's files (`model_hints`), and these
    over the defaults. The defaults are mean, no prefixes, and normalised, since inner products of unknown
    lengths mean little.
    """
    family = find_family(name, model) or EncoderHints()

    def first_known(field: str) -> Any:
        value = getattr(family, field)
        return getattr(model_hints, field) if value is None else value

    notes = []
    pooling = pooling or first_known("pooling")
    normalize = first_known("normalize")
    if pooling is None:
        notes.append(f"{model}: nothing says how it pools, so mean is taken; --pooling_method changes it")
    if normalize is None:
        notes.append(f"{model}: nothing says whether its vectors are normalised, so they are")
    lengths = (max_query_length or MAX_LENGTH, max_passage_length or MAX_LENGTH)
    prefixes = (first_known("query_prefix") or "", first_known("passage_prefix") or "")
    bounded = (min(length, model_hints.max_length or length) for length in lengths)
    settings = EncoderSettings(name, model, pooling or "mean", normalize is not False, *prefixes, *bounded)
    return settings, notes


def network_names(model: str) -> tuple[str, str]:
    """Return the names of the networks for queries and for passages.

    They differ for DPR alone, which has two networks, in this word.
    """
    for_queries = model.replace("ctx_encoder", "question_encoder")
    for_passages = model.replace("question_encoder", "ctx_encoder")
    return for_queries, for_passages


def settings_of_index(
    values: dict[str, Any], model: str | None, pooling: str | None, max_query_length: int | None
) -> EncoderSettings:
    """Return the settings in an index's manifest, with the model where it lies on this machine.

    Raises ValueError for a manifest that lacks a setting or has Dense layers, and for a flag that contradicts
    it.
    """
    names = [field.name for field in fields(EncoderSettings)]
    if missing := [name for name in names if name not in values]:
        problem = f"doesn't say the encoder's {', '.join(missing)}"
        raise ValueError(f"the index's manifest {problem}: build it again")
    if values.get("modules"):
        raise ValueError("the index's manifest has an encoder with Dense layers: build it again")
    settings = EncoderSettings(**{name: values[name] for name in names})
    if pooling is not None and pooling != settings.pooling:
        raise ValueError(
            f"--pooling_method: found {pooling}, but the index was built with {settings.pooling} pooling: "
            "leave the flag out, or build the index again"
        )
    length = max_query_length or settings.max_query_length
    return replace(settings, model=model or settings.model, max_query_length=length)
