"""Text encoders: texts in, vectors out, by any Hugging Face encoder.

    texts -> prefix -> token ids -> batches without padding -> network -> pooling -> Dense? -> unit length?
          -> np.ndarray [N, D] float32

On a CPU no padding reaches the network: texts of BERT's relatives run packed in one row of tokens with
attention inside each text (packed_bert.py), other networks get batches of equal token counts. This is the
fastest way, and on one thread a text gets the same bits whatever texts it comes with (several threads split a
product by its size: then the last bits may differ). On a GPU batches are sorted by length and padded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer

from search_r1.search.dense.encoder_settings import (
    POOLINGS,
    EncoderSettings,
    decide_settings,
    read_model_files,
    settings_of_index,
)
from search_r1.search.dense.packed_bert import (
    PACKED_TYPES,
    can_pack,
    first_position,
    packed_attention_name,
    run_packed,
)

CPU_BATCH_TOKENS = 4096  # tokens in one pass through the network: its intermediate results stay in the cache
GPU_BATCH_TOKENS = 64 * 1024
MAX_QUERY_LENGTH, MAX_PASSAGE_LENGTH = 256, 256
FINGERPRINT_VALUES = 64  # of each weight
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Encoder:
    """A loaded encoder. Use `Encoder.open`. One thread at a time.

    `settings`: JSON values for the manifest: EncoderSettings, `dimension`, and `fingerprint` of the weights.
    `notes`: lines for people about what had to be guessed.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        tokenizer: Any,
        networks: dict[str, transformers.PreTrainedModel],
        dense: list[DenseLayer],
        notes: list[str],
    ) -> None:
        """`networks`: "query" and "passage", mostly the same object."""
        self._settings, self._tokenizer, self._networks, self._dense = settings, tokenizer, networks, dense
        self.notes = notes
        self.device = next(networks["query"].parameters()).device
        self.dtype = next(networks["query"].parameters()).dtype
        config = networks["query"].config
        self.dimension = dense[-1].out_features if dense else config.hidden_size
        self.settings: dict[str, Any] = {**settings.as_dict(), "dimension": self.dimension}

    @classmethod
    def open(
        cls,
        name: str,
        model: str | None,
        device: str | None = None,
        pooling: str | None = None,
        max_query_length: int | None = None,
        max_passage_length: int | None = None,
        dtype: str | None = None,
        index_settings: dict[str, Any] | None = None,
    ) -> Encoder:
        """Loads a model by hub id or folder.

        `name`: the retriever's name ("e5"), used where the model's own says nothing. `device`: "cpu", "cuda",
        "cuda:1"; None: the first GPU that is there, else the CPU. `dtype`: float32, bfloat16, float16; None:
        float16 on a GPU (bfloat16 for T5 and what was published in it: their values may be too large for
        float16), bfloat16 on a CPU that has instructions for it, else float32. Lengths are in tokens,
        at most 256 unless told. `index_settings`: what the manifest of an index keeps; then all settings come
        from there, `model` only says where the model lies now.

        Raises ValueError for a model that can't be read or run, and for arguments that contradict the index.
        """
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(f"--pooling_method: found {pooling!r}, expected one of {', '.join(POOLINGS)}")
        notes: list[str] = []
        if index_settings is not None:
            settings = settings_of_index(index_settings, model, pooling, max_query_length)
        elif not model:
            raise ValueError(
                f"--retriever_model is missing: the encoder of {name!r}, for example intfloat/e5-base-v2"
            )
        else:
            settings, notes = decide_settings(
                name,
                model,
                read_model_files(_file_finder(model)),
                pooling=pooling,
                max_query_length=max_query_length or MAX_QUERY_LENGTH,
                max_passage_length=max_passage_length or MAX_PASSAGE_LENGTH,
            )
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"the encoder's dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
        precision = DTYPES[dtype] if dtype is not None else None
        with _plain_errors(settings.model):
            networks, fingerprint = _load_networks(settings.model, precision, place)
            tokenizer = AutoTokenizer.from_pretrained(_passage_model(settings.model))
            dense = [_load_dense(settings.model, folder).to(place) for folder in settings.modules]
        encoder = cls(settings, tokenizer, networks, dense, notes)
        encoder.settings["fingerprint"] = fingerprint
        if index_settings is not None and index_settings.get("fingerprint", fingerprint) != fingerprint:
            raise ValueError(
                f"--retriever_model: {settings.model} has other weights than the model that built the index "
                f"({index_settings['model']}): give that model, or build the index again"
            )
        return encoder

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Vectors [N, D] float32 of queries."""
        settings = self._settings
        return self._encode(texts, "query", settings.query_prefix, settings.max_query_length)

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        """Vectors [N, D] float32 of passages, each a document's `contents`, title line and all.

        Give many at once (thousands): they are sorted by length, so that batches hold texts of like lengths.
        """
        settings = self._settings
        return self._encode(texts, "passage", settings.passage_prefix, settings.max_passage_length)

    def describe(self) -> str:
        """One line for people."""
        settings = self._settings
        unit = "normalised" if settings.normalize else "not normalised"
        return (
            f"encoder {settings.model}: {self.dimension} dimensions, {settings.pooling} pooling, {unit}, "
            f"query prefix {settings.query_prefix!r}, passage prefix {settings.passage_prefix!r}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        )

    @torch.inference_mode()
    def _encode(self, texts: list[str], side: str, prefix: str, max_length: int) -> np.ndarray:
        vectors = torch.empty(len(texts), self.dimension)
        if not texts:
            return vectors.numpy()
        network = self._networks[side]
        ids = self._tokenize([prefix + text for text in texts], network, max_length)
        lengths = np.array([len(row) for row in ids])
        order = np.argsort(lengths, kind="stable")
        gpu = self.device.type == "cuda"
        pack = not gpu and can_pack(network)
        for rows in _batches(
            lengths[order], GPU_BATCH_TOKENS if gpu else CPU_BATCH_TOKENS, equal=not (gpu or pack)
        ):
            chosen = order[rows]
            batch = [ids[row] for row in chosen]
            pooled = run_packed(network, batch, self._pool) if pack else self._run_padded(network, batch)
            vectors[torch.from_numpy(chosen)] = self._finish(pooled).cpu()
        return vectors.numpy()

    def _tokenize(
        self, texts: list[str], network: transformers.PreTrainedModel, max_length: int
    ) -> list[list[int]]:
        """Token ids; never empty, and no longer than the network has positions."""
        config = network.config
        if config.model_type != "t5":  # T5 has relative positions, no end of them
            positions = getattr(config, "max_position_embeddings", max_length)
            max_length = min(max_length, positions - first_position(config.model_type))
        # Half a surrogate pair is a str for Python and an error for the tokenizer.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        rows = self._tokenizer(
            clean,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        filler = self._filler
        return [row or [filler] for row in rows]

    @property
    def _filler(self) -> int:
        known = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    def _run_padded(self, network: transformers.PreTrainedModel, batch: list[list[int]]) -> torch.Tensor:
        """Pooled vectors [B, H] float32 of token ids, padded on the right if their lengths differ."""
        longest, lengths = max(map(len, batch)), torch.tensor([len(row) for row in batch])
        ids = torch.tensor([row + [self._filler] * (longest - len(row)) for row in batch]).to(self.device)
        mask = (torch.arange(longest) < lengths[:, None]).to(self.device)
        masked = {} if len(batch[0]) == longest and bool(mask.all()) else {"attention_mask": mask.long()}
        hidden = network(input_ids=ids, **masked).last_hidden_state
        return self._pool(hidden, mask if masked else None)

    def _pool(self, hidden_BLH: torch.Tensor, mask_BL: torch.Tensor | None) -> torch.Tensor:
        """One float32 vector [B, H] of each text. `mask_BL`: True for its tokens, padding on the right."""
        pooling = self._settings.pooling
        if pooling == "cls":
            return hidden_BLH[:, 0].float()
        if pooling == "last":
            if mask_BL is None:
                return hidden_BLH[:, -1].float()
            return hidden_BLH[torch.arange(len(hidden_BLH)), mask_BL.sum(1) - 1].float()
        hidden_BLH = hidden_BLH.float()
        if pooling == "max":
            if mask_BL is not None:
                hidden_BLH = hidden_BLH.masked_fill(~mask_BL[..., None], -torch.inf)
            return hidden_BLH.amax(1)
        if mask_BL is None:
            return hidden_BLH.mean(1)
        return (hidden_BLH * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdim=True)

    def _finish(self, pooled_BH: torch.Tensor) -> torch.Tensor:
        for layer in self._dense:
            pooled_BH = layer(pooled_BH)
        return torch.nn.functional.normalize(pooled_BH, dim=-1) if self._settings.normalize else pooled_BH


class DenseLayer(torch.nn.Module):
    """A sentence-transformers Dense module: linear, then its activation. [B, in] -> [B, out] float32."""

    def __init__(
        self, weights: dict[str, torch.Tensor], activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weights["linear.weight"].float(), requires_grad=False)
        bias = weights.get("linear.bias")
        self.bias = None if bias is None else torch.nn.Parameter(bias.float(), requires_grad=False)
        self.activation = activation
        self.out_features = len(self.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.activation(torch.nn.functional.linear(inputs, self.weight, self.bias))


def _batches(lengths: np.ndarray, max_tokens: int, equal: bool) -> Iterator[slice]:
    """Cuts ascending token counts into batches of `max_tokens` (padded); if `equal`, of one count each."""
    start = 0
    for end in range(1, len(lengths) + 1):
        full = end < len(lengths) and (end + 1 - start) * lengths[end] > max_tokens
        if end == len(lengths) or full or (equal and lengths[end] != lengths[start]):
            yield slice(start, end)
            start = end


def _best_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The half precision that suits network and device; float32 on a CPU without one."""
    if device.type == "cuda":
        outgrows_float16 = config.model_type == "t5" or config.dtype == torch.bfloat16
        return torch.bfloat16 if outgrows_float16 else torch.float16
    return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; elsewhere it is slower than float32."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in text or "amx_bf16" in text


def _file_finder(model: str) -> Callable[[str], Path | None]:
    """Finds a file of a model in its folder, or on the hub and its cache."""
    if Path(model).is_dir():
        return lambda name: path if (path := Path(model) / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    def find(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(model, name))
        except (EntryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError):
            return None  # not there, or the hub is out of reach; loading the weights says which

    return find


@contextlib.contextmanager
def _plain_errors(model: str) -> Iterator[None]:
    """Turns what the libraries raise for a model that can't be read into one line."""
    try:
        yield
    except (OSError, KeyError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        if reason.startswith("--"):
            raise  # one of ours
        raise ValueError(f"--retriever_model: can't load {model}: {reason}") from error


def _query_model(model: str) -> str:
    return model.replace("ctx_encoder", "question_encoder")


def _passage_model(model: str) -> str:
    """DPR has two networks, whose names differ in this word."""
    return model.replace("question_encoder", "ctx_encoder")


def _load_networks(
    model: str, dtype: torch.dtype | None, device: torch.device
) -> tuple[dict[str, transformers.PreTrainedModel], str]:
    """The networks for queries and passages, and a fingerprint of their weights."""
    query, digest = _load_network(_query_model(model), dtype, device)
    if _passage_model(model) == _query_model(model):
        return {"query": query, "passage": query}, digest
    passage, second = _load_network(_passage_model(model), dtype, device)
    return {"query": query, "passage": passage}, digest + second


def _load_network(
    model: str, dtype: torch.dtype | None, device: torch.device
) -> tuple[transformers.PreTrainedModel, str]:
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
        options["attn_implementation"] = packed_attention_name()
    with _quiet():
        network, info = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True, **options)
    missing = [key for key in info["missing_keys"] if "pooler" not in key and "position_ids" not in key]
    if missing:
        raise ValueError(
            f"--retriever_model: {model} has no weights for {len(missing)} parts, such as {missing[0]}"
        )
    if config.model_type == "dpr":  # a BERT inside a shell that only takes its first token
        network = (network.ctx_encoder if "ctx_encoder" in model else network.question_encoder).bert_model
    digest = _fingerprint(network)
    return network.to(device=device, dtype=dtype or _best_dtype(config, device)).eval(), digest


def _fingerprint(network: transformers.PreTrainedModel) -> str:
    """A hash of the first values of each weight: tells models apart wherever they lie."""
    digest = hashlib.sha256()
    for name, weight in sorted(network.named_parameters()):
        digest.update(name.encode() + weight.detach().flatten()[:FINGERPRINT_VALUES].numpy().tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No table of unused weights on the screen; missing ones are an error of our own."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_dense(model: str, folder: str) -> DenseLayer:
    find = _file_finder(model)
    config_path = find(f"{folder}/config.json")
    config = json.loads(config_path.read_text()) if config_path else {}
    activation = config.get("activation_function", "torch.nn.modules.linear.Identity").rsplit(".", 1)[-1]
    if activation not in ("Identity", "Tanh"):
        raise ValueError(
            f"{model}/{folder}: activation {activation} is not supported, only Identity and Tanh"
        )
    if (path := find(f"{folder}/model.safetensors")) is not None:
        from safetensors.torch import load_file

        weights = load_file(path)
    elif (path := find(f"{folder}/pytorch_model.bin")) is not None:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    else:
        raise ValueError(f"{model}/{folder}: no model.safetensors and no pytorch_model.bin")
    return DenseLayer(weights, torch.tanh if activation == "Tanh" else torch.nn.Identity())


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core per server; also quiet after a fork
