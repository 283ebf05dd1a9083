"""Text encoders: texts in, vectors out, by any Hugging Face encoder.

    texts -> prefix -> token ids -> batches without padding -> network -> pooling -> unit length?
          -> np.ndarray [N, D] float32

On a CPU no padding reaches the network. Texts of BERT's relatives run packed in one row of tokens with
attention inside each text (packed_bert.py). Other networks get batches of equal token counts. On one thread a
text gets the same bits whatever texts it comes with. (Several threads split a product by its size, so the
last bits may differ.) On a GPU batches are sorted by length and padded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file

from search_r1.search.dense.encoder_settings import (
    POOLINGS,
    decide_settings,
    network_names,
    read_model_files,
    settings_of_index,
)
from search_r1.search.dense.packed_bert import PACKED_ATTENTION, PACKED_TYPES, first_position, run_packed
from search_r1.search.replies import without_surrogates
from verl.utils.hub import use_cache_if_hub_is_away

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core per server, and no warning after a fork
# No table of unused weights is printed. Missing weights are an error of our own.
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Tokens in one pass through the network. On a CPU its intermediate results stay in the cache.
CPU_BATCH_TOKENS = 4096
GPU_BATCH_TOKENS = 64 * 1024
FINGERPRINT_VALUES = 64  # how many values of each weight the fingerprint is made of
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Encoder:
    """A loaded encoder. It is used by one thread at a time.

    Attributes:
        settings: JSON values for the manifest: EncoderSettings, `dimension`, and `fingerprint` of the
            weights.
        notes: Lines about what had to be guessed.
    """

    def __init__(
        self,
        name: str,
        model: str | None,
        device: str | None = None,
        pooling: str | None = None,
        max_query_length: int | None = None,
        max_passage_length: int | None = None,
        dtype: str | None = None,
        index_settings: dict[str, Any] | None = None,
    ) -> None:
        """Load a model by hub id or folder.

        Args:
            name: The retriever's name ("e5"), used where the model's own name says nothing.
            model: The hub id or folder. With `index_settings` it only says where the model lies now.
            device: "cpu", "cuda" or "cuda:1". None means the first GPU that is there, else the CPU.
            pooling: One of POOLINGS, or None for the model's own.
            max_query_length: In tokens. None means 256.
            max_passage_length: In tokens. None means 256. A model's own limit bounds both lengths.
            dtype: float32, bfloat16 or float16. None means what `_best_dtype` says.
            index_settings: What the manifest of an index keeps. If it is given, all settings come from there,
                and only `max_query_length` may differ.

        Raises:
            ValueError: For a model that can't be read or run, and for arguments that contradict the index.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(f"--pooling_method: found {pooling!r}, expected one of {', '.join(POOLINGS)}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.notes: list[str] = []
        if index_settings is not None:
            settings = settings_of_index(index_settings, model, pooling, max_query_length)
            model = settings.model
        elif not model:
            example = "for example intfloat/e5-base-v2"
            raise ValueError(f"--retriever_model is missing: the encoder of {name!r}, {example}")
        try:
            if index_settings is None:
                model_hints = read_model_files(partial(_find_file, model))
                lengths = (max_query_length, max_passage_length)
                settings, self.notes = decide_settings(name, model, model_hints, pooling, *lengths)
            for_queries, for_passages = network_names(model)
            torch_dtype = None if dtype is None else DTYPES[dtype]
            self._query_network, fingerprint = _load_network(for_queries, torch_dtype, self.device)
            self._passage_network = self._query_network
            if for_passages != for_queries:
                self._passage_network, suffix = _load_network(for_passages, torch_dtype, self.device)
                fingerprint += suffix
            self._tokenizer = AutoTokenizer.from_pretrained(for_passages)
        except (OSError, KeyError, ValueError) as error:
            raise cannot_load("--retriever_model", model, error) from error
        self._settings = settings
        self.dimension = self._query_network.config.hidden_size
        self.settings = asdict(settings) | {"dimension": self.dimension, "fingerprint": fingerprint}
        if index_settings is not None and index_settings.get("fingerprint", fingerprint) != fingerprint:
            raise ValueError(
                f"--retriever_model: {model} has other weights than the model that built the index "
                f"({index_settings['model']}): give that model, or build the index again"
            )

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Return vectors [N, D] float32 of queries."""
        texts = [self._settings.query_prefix + text for text in texts]
        return self._encode(texts, self._query_network, self._settings.max_query_length)

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        """Return vectors [N, D] float32 of passages, each a document's `contents`, title line and all.

        Give thousands at once. They are sorted by length, so that batches hold texts of like lengths.
        """
        texts = [self._settings.passage_prefix + text for text in texts]
        return self._encode(texts, self._passage_network, self._settings.max_passage_length)

    def describe(self) -> str:
        """Describe the encoder in one line for people."""
        settings = self._settings
        return (
            f"encoder {settings.model}: {self.dimension} dimensions, {settings.pooling} pooling, "
            f"{'normalised' if settings.normalize else 'not normalised'}, "
            f"query prefix {settings.query_prefix!r}, passage prefix {settings.passage_prefix!r}, "
            f"{str(self._query_network.dtype).removeprefix('torch.')} on {self.device}"
        )

    @torch.inference_mode()
    def _encode(self, texts: list[str], network: transformers.PreTrainedModel, max_length: int) -> np.ndarray:
        vectors = torch.empty(len(texts), self.dimension)
        if not texts:
            return vectors.numpy()
        config = network.config
        if config.model_type != "t5":  # T5 has relative positions, so there is no end of them
            positions = getattr(config, "max_position_embeddings", max_length)
            max_length = min(max_length, positions - first_position(config.model_type))
        clean = [without_surrogates(text) for text in texts]
        unused = {"return_attention_mask": False, "return_token_type_ids": False}
        ids = self._tokenizer(clean, truncation=True, max_length=max_length, **unused)["input_ids"]
        candidates = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        pad_id = next(token for token in candidates if token is not None)
        ids = [row or [pad_id] for row in ids]
        lengths = np.array([len(row) for row in ids])
        order = np.argsort(lengths, kind="stable")
        on_gpu = self.device.type == "cuda"
        is_packed = config._attn_implementation == PACKED_ATTENTION
        max_tokens = GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS
        for rows in _batches(lengths[order], max_tokens, equal=not (on_gpu or is_packed)):
            batch = [ids[row] for row in order[rows]]
            if is_packed:
                pooled = run_packed(network, batch, self._pool)
            else:
                longest = len(batch[-1])
                padded = torch.tensor([row + [pad_id] * (longest - len(row)) for row in batch])
                mask = torch.arange(longest) < torch.tensor([[len(row)] for row in batch])
                masked = {} if mask.all() else {"attention_mask": mask.long().to(self.device)}
                hidden = network(input_ids=padded.to(self.device), **masked).last_hidden_state
                pooled = self._pool(hidden, mask.to(self.device) if masked else None)
            if self._settings.normalize:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            vectors[torch.from_numpy(order[rows])] = pooled.cpu()
        return vectors.numpy()

    def _pool(self, hidden_BLH: torch.Tensor, mask_BL: torch.Tensor | None) -> torch.Tensor:
        """Return one float32 vector of each text, [B, H].

        `mask_BL` is True for a text's tokens, with padding on the right. None means that there is no padding.
        """
        if mask_BL is None:
            mask_BL = hidden_BLH.new_ones(hidden_BLH.shape[:2], dtype=torch.bool)
        lengths_B1 = mask_BL.sum(1, keepdim=True)
        pooling = self._settings.pooling
        if pooling == "cls":
            return hidden_BLH[:, 0].float()
        if pooling == "last":
            return hidden_BLH.take_along_dim(lengths_B1[..., None] - 1, dim=1)[:, 0].float()
        if pooling == "max":
            return hidden_BLH.float().masked_fill(~mask_BL[..., None], -torch.inf).amax(1)
        return (hidden_BLH.float() * mask_BL[..., None]).sum(1) / lengths_B1


def _batches(lengths: np.ndarray, max_tokens: int, equal: bool) -> Iterator[slice]:
    """Cut ascending token counts into batches of at most `max_tokens` tokens, padding included.

    If `equal`, all texts of a batch have the same count.
    """
    start = 0
    for end in range(1, len(lengths) + 1):
        full = end < len(lengths) and (end + 1 - start) * lengths[end] > max_tokens
        if end == len(lengths) or full or (equal and lengths[end] != lengths[start]):
            yield slice(start, end)
            start = end


def cannot_load(flag: str, model: str, error: Exception) -> ValueError:
    """Return an error that says in one line what is wrong with a model."""
    reason = str(error).strip().split("\n")[0]
    return ValueError(reason if reason.startswith("--") else f"{flag}: can't load {model}: {reason}")


def _best_dtype(config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype in which a model runs best on a device.

    On a GPU it is float16, but bfloat16 for T5 and for what was published in bfloat16, whose values may be
    too large. On a CPU it is bfloat16 if the CPU has instructions for it, else float32.
    """
    if device.type == "cuda":
        outgrows_float16 = config.model_type == "t5" or config.dtype == torch.bfloat16
        return torch.bfloat16 if outgrows_float16 else torch.float16
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def _find_file(model: str, name: str) -> str | None:
    """Return where a file of a model lies, in its folder or in the hub's cache. It is fetched if need be."""
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    return cached_file(model, name, **{f"_raise_exceptions_for_{kind}": False for kind in kinds})


def _load_network(
    model: str, dtype: torch.dtype | None, device: torch.device
) -> tuple[transformers.PreTrainedModel, str]:
    """Return the network, and a hash of the first values of each weight.

    The hash tells models apart wherever they lie.
    """
    config = AutoConfig.from_pretrained(model)
    kind: Any = AutoModel
    options: dict[str, Any] = {}
    if config.model_type == "t5":
        kind = transformers.T5EncoderModel
    elif config.model_type == "dpr":
        kind = transformers.DPRContextEncoder if "ctx_encoder" in model else transformers.DPRQuestionEncoder
    elif config.model_type in (*PACKED_TYPES, "mpnet"):
        options["add_pooling_layer"] = False
    if device.type == "cpu" and config.model_type in PACKED_TYPES:
        options["attn_implementation"] = PACKED_ATTENTION
    network, info = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True, **options)
    missing = [key for key in info["missing_keys"] if "pooler" not in key and "position_ids" not in key]
    if missing:
        missing_text = f"{len(missing)} parts, such as {missing[0]}"
        raise ValueError(f"--retriever_model: {model} has no weights for {missing_text}")
    if config.model_type == "dpr":  # a BERT inside a shell that only takes its first token
        network = (network.ctx_encoder if "ctx_encoder" in model else network.question_encoder).bert_model
    digest = hashlib.sha256()
    for name, weight in sorted(network.named_parameters()):
        digest.update(name.encode() + weight.detach().flatten()[:FINGERPRINT_VALUES].numpy().tobytes())
    network = network.to(device=device, dtype=dtype or _best_dtype(config, device)).eval()
    return network, digest.hexdigest()[:16]


def text_encoder(model: str) -> Callable[[list[str]], np.ndarray]:
    """Return a function from texts to their vectors, by the encoder of a folder or hub id."""
    use_cache_if_hub_is_away({"--encoder": model})
    return Encoder(Path(model).name, model).encode_passages
