"""A cross-encoder over any backend: it reads query and passage together and orders what the backend found.

    queries -> backend: its first max(retrieval_topk, topk) documents
            -> (query, contents) pairs of all queries, sorted by length, in batches -> logits -> the best topk

The method is that of Nogueira and Cho, "Passage Re-ranking with BERT" (2019). Any
AutoModelForSequenceClassification will do that has one logit (cross-encoder/ms-marco-MiniLM-L12-v2,
BAAI/bge-reranker-base) or two (the second says "relevant").
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from search_r1.search.dense.encoder import cannot_load
from search_r1.search.dense.packed_bert import first_position
from search_r1.search.replies import without_surrogates
from search_r1.search.search_backend import SearchBackend, SearchResult, best_first

# The decimals of a logit. A pair's last bits depend on the pairs that it is batched with. Its rank must not.
DECIMALS = 4


class CrossEncoder:
    """A loaded cross-encoder. It is used by one thread at a time."""

    def __init__(self, model: str, batch_size: int = 32, max_length: int = 512, device: str | None = None):
        """Load a cross-encoder.

        Args:
            model: A folder or a hub name.
            batch_size: Pairs at once.
            max_length: The most tokens of a pair.
            device: "cpu", "cuda", ... None means the first GPU if there is one, else the CPU.

        Raises:
            ValueError: For a model that can't be read or is no cross-encoder.
        """
        self.model = model
        self._batch_size = batch_size
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            load = AutoModelForSequenceClassification.from_pretrained
            network, info = load(model, dtype=torch.float32, output_loading_info=True)
            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, KeyError, ValueError) as error:
            raise cannot_load("--reranker_model", model, error) from error
        config = network.config
        if missing := sorted(info["missing_keys"]):
            example = "One is cross-encoder/ms-marco-MiniLM-L12-v2"
            problem = f"{model} is no cross-encoder: it has no weights for {missing[0]}"
            raise ValueError(f"--reranker_model: {problem}. {example}")
        if config.num_labels > 2:
            expected = "expected 1 or 2: how relevant a passage is"
            raise ValueError(f"--reranker_model: {model} has {config.num_labels} labels, {expected}")
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self._network = network.to(device=self.device, dtype=dtype).eval()
        positions = getattr(config, "max_position_embeddings", max_length)
        self._max_length = min(max_length, positions - first_position(config.model_type))
        # sentence-transformers puts a sigmoid on the logits, unless the config names another class.
        activation = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
        activation = activation or getattr(config, "sbert_ce_default_activation_function", None)
        self._sigmoid = "Identity" not in str(activation)

    def score(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Return a score for each (query, passage).

        It is a logit, or its sigmoid where the model's card has it so.
        """
        logits = self.logits(pairs)
        return (logits.sigmoid() if self._sigmoid else logits).tolist()

    @torch.inference_mode()
    def logits(self, pairs: list[tuple[str, str]]) -> torch.Tensor:
        """Return the logits of pairs: [N] float64, rounded to DECIMALS.

        If the model has two logits, the result is their difference, the log odds of "relevant".
        """
        logits = torch.empty(len(pairs), dtype=torch.float64)
        if not pairs:
            return logits
        cut = self._cut({query for query, _ in pairs})
        texts = [(cut[query], without_surrogates(passage)) for query, passage in pairs]
        encoded = self._tokenizer(texts, truncation="only_second", max_length=self._max_length)
        lengths = torch.tensor([len(ids) for ids in encoded["input_ids"]])
        for rows in lengths.argsort(stable=True).split(self._batch_size):
            batch = {name: [values[row] for row in rows] for name, values in encoded.items()}
            padded = self._tokenizer.pad(batch, return_tensors="pt").to(self.device)
            outputs = self._network(**padded).logits.double().cpu()
            logits[rows] = outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs[:, 0]
        return logits.round(decimals=DECIMALS)

    def _cut(self, queries: set[str]) -> dict[str, str]:
        """Return each query, cut to half of what the model reads, so that the passage has the other half."""
        clean = {query: without_surrogates(query) for query in queries}
        options = {"add_special_tokens": False, "truncation": True, "return_offsets_mapping": True}
        tokens = self._tokenizer(list(clean.values()), max_length=self._max_length // 2, **options)
        ends = [offsets[-1][1] if offsets else 0 for offsets in tokens["offset_mapping"]]
        return {query: text[:end] for (query, text), end in zip(clean.items(), ends, strict=True)}


class RerankRetriever:
    """A retriever that reorders what another backend finds. Its scores are the cross-encoder's."""

    def __init__(self, inner: SearchBackend, encoder: CrossEncoder, retrieval_topk: int = 10) -> None:
        """Put a cross-encoder over a backend.

        `retrieval_topk` is the number of documents that it reads for each query, or more when a query wants
        more.
        """
        self._inner = inner
        self._encoder = encoder
        self._depth = retrieval_topk
        self.name = f"{inner.name}+rerank"
        self.num_documents = inner.num_documents

    def batch_search(self, queries: list[str], topk: int) -> SearchResult:
        """Return for each query at most `topk` documents, best first, ties by row, and their new scores."""
        candidates, _ = self._inner.batch_search(queries, max(topk, self._depth))
        rows = zip(queries, candidates, strict=True)
        scores = iter(
            self._encoder.score([(query, candidate.contents) for query, row in rows for candidate in row])
        )
        scored = ([(document, next(scores)) for document in row] for row in candidates)
        return best_first(scored, topk)

    def describe(self) -> dict[str, Any]:
        encoder = {"model": self._encoder.model, "device": str(self._encoder.device)}
        depth = {"retrieval_topk": self._depth, "over": self._inner.describe()}
        return {"backend": "rerank", **encoder, **depth}

    def close(self) -> None:
        self._inner.close()
