"""The BM25 index on disk: files that are mapped into memory, so that only what queries touch is resident.

    terms.bin, term_starts.npy     the terms in UTF-8, sorted by their bytes; a term's number is its position
    posting_starts.npy             where each term's postings begin in the next two
    documents.npy                  uint32, the rows that have the term, ascending
    codes.npy                      uint8, how often and in how long a document: a number of `pairs`
    pairs.npy                      uint8 [C, 2] (frequency, norm) of each code, the most frequent first
    rare_at.npy, rare_frequency.npy  the postings whose code is RARE_CODE, for which there is no pair
    highest.npy                    float32, each term's highest frequency * inverse_norm
    norms.npy                      uint8, the length of each document (see encode_lengths)
    skip_terms.npy, skips.npy      for frequent terms the posting at which each SKIP_WIDTH of documents begins
    block_terms.npy, block_shares.npy  uint8, for very frequent terms the highest score in each BLOCK_WIDTH of
                                   documents: in 255ths of the term's weight, rounded up; 0 if none has it
    index.json                     counts and versions; written last

A code stands for frequency and length. So a term's scores are a table of 256 numbers for each query, and the
lengths of the documents, which are scattered over memory, need not be read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from search_r1.search.bm25.analysis import ANALYSIS_VERSION
from search_r1.search.compiled import jit

K1 = 0.9
B = 0.4
"""The parameters of BM25 as Lucene computes it, to the last bit of its float32 scores.

    score(query, document) = sum over terms of  w - w / (1 + freq * inverse_norm[norm])     w = count * idf
    idf = log(1 + (N - n + 0.5) / (n + 0.5))     inverse_norm = 1 / (k1 * (1 - b + b * length / average))

The formula is that of Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond"
(2009). The sum's term is idf * freq / (freq + k1 * (...)), written so that it never falls when freq grows. N
is the number of documents that have a word, n is how many have this one, and `count` is how often the query
has it. Each term of the sum is a float32. They are added in double precision, and the sum is rounded to
float32.

A document's length is kept in one byte, its norm. It is exact up to 40, and has four significant bits beyond.
"""


NORM_LENGTHS = np.array(
    [*range(32), *(24 + ((code & 7 | 8) << (code >> 3) - 1) for code in range(8, 256 - 24))], dtype=np.int64
)
"""The length that each norm stands for: int64 [256], increasing (Lucene's SmallFloat.byte4ToInt)."""


def encode_lengths(lengths: np.ndarray) -> np.ndarray:
    """Return the norms (uint8) of document lengths, which are numbers of terms.

    The norm of a length is the largest one that does not stand for more.
    """
    return (np.searchsorted(NORM_LENGTHS, lengths, side="right") - 1).astype(np.uint8)


def inverse_norms(average_length: float) -> np.ndarray:
    """Return the formula's inverse_norm of each norm: float32 [256].

    `average_length` is that of the documents with a word.
    """
    one, k1, b, average = map(np.float32, (1, K1, B, average_length))
    return one / (k1 * ((one - b) + b * NORM_LENGTHS.astype(np.float32) / average))


def idf(num_documents: int, document_frequency: np.ndarray) -> np.ndarray:
    """Return the weight of terms as float32. `num_documents` counts the documents with a word."""
    frequency = document_frequency.astype(np.float64)
    return np.log(1 + (num_documents - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)


FORMAT_VERSION = 2
HEADER_NAME = "index.json"
RARE_CODE = 255
SKIP_BITS = 9
SKIP_WIDTH = 1 << SKIP_BITS  # documents
MIN_SKIPPED = 1  # a term has skips if it has this many postings in SKIP_WIDTH documents, on average
BLOCK_BITS = 2
BLOCK_WIDTH = 1 << BLOCK_BITS  # documents
BLOCKED_SHARE = 40  # a term has bounds of blocks if one of this many documents has it, so it has skips, too
SHARE_STEPS = 255


@dataclass(frozen=True)
class IndexHeader:
    """The contents of index.json."""

    num_documents: int
    num_filled: int  # documents with a word
    num_tokens: int
    num_terms: int
    num_postings: int
    format_version: int = FORMAT_VERSION
    analysis_version: int = ANALYSIS_VERSION
    k1: float = K1
    b: float = B

    @property
    def average_length(self) -> float:
        """Return the number of tokens per document with a word."""
        return self.num_tokens / self.num_filled


def read_header(folder: Path) -> IndexHeader:
    """Return the header of the index in `folder`.

    Raises ValueError if `folder` holds no index of this kind, or one of another version.
    """
    try:
        header = IndexHeader(**json.loads((folder / HEADER_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise ValueError(
            f"--index_path: {folder} is not a BM25 index of this server. Build one with `python -m "
            "search_r1.search.index_builder --retrieval_method bm25`, or leave --index_path out to index in "
            "memory"
        ) from None
    current = (FORMAT_VERSION, ANALYSIS_VERSION, K1, B)
    version = (header.format_version, header.analysis_version, header.k1, header.b)
    if version != current:
        raise ValueError(
            f"--index_path: {folder} was built by another version (format, analysis, k1, b: {version}; here "
            f"{current}). Build it again with `python -m search_r1.search.index_builder`"
        )
    return header


@dataclass(frozen=True)
class Index:
    """The mapped files of an index, read-only. The docstring of this file describes them."""

    header: IndexHeader
    num_bytes: int
    terms: np.ndarray
    term_starts: np.ndarray
    posting_starts: np.ndarray
    documents: np.ndarray
    codes: np.ndarray
    pairs: np.ndarray
    rare_at: np.ndarray
    rare_frequency: np.ndarray
    highest: np.ndarray
    norms: np.ndarray
    skip_terms: np.ndarray
    skips: np.ndarray
    block_terms: np.ndarray
    block_shares: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Open the index in `folder`.

        Raises ValueError for a folder that holds no whole index.
        """
        header = read_header(folder)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        try:
            terms = np.asarray(np.memmap(folder / "terms.bin", dtype=np.uint8, mode="r"))
            arrays = {
                field.name: np.asarray(np.load(folder / f"{field.name}.npy", mmap_mode="r"))
                for field in fields(cls)[3:]
            }
            index = cls(header, num_bytes, terms, **arrays)
            counts = (len(index.norms), len(index.term_starts) - 1, len(index.documents), len(index.codes))
            if counts != (header.num_documents, header.num_terms, header.num_postings, header.num_postings):
                raise ValueError(f"found {counts} documents, terms and postings, expected {header}")
            if len(terms) != index.term_starts[-1]:
                raise ValueError(f"terms.bin has {len(terms)} bytes, expected {index.term_starts[-1]}")
        except (OSError, ValueError) as error:
            problem = f"the index in {folder} is damaged ({error})"
            raise ValueError(f"--index_path: {problem}; build it again") from None
        return index

    def find_term(self, term: str) -> int:
        """Return the number of a term, or -1 if no document has it."""
        return find_bytes(self.terms, self.term_starts, np.frombuffer(term.encode(), dtype=np.uint8))


@jit
def find_bytes(terms, term_starts, wanted):
    """Return the position of `wanted` (uint8 [L]) among the sorted terms, or -1 if it isn't there."""
    low = 0
    high = len(term_starts) - 1
    while low < high:
        middle = (low + high) // 2
        start = term_starts[middle]
        stop = term_starts[middle + 1]
        length = min(stop - start, len(wanted))
        offset = 0
        while offset < length and terms[start + offset] == wanted[offset]:
            offset += 1
        if offset < length:
            is_less = terms[start + offset] < wanted[offset]
        else:
            is_less = stop - start < len(wanted)
            if stop - start == len(wanted):
                return middle
        if is_less:
            low = middle + 1
        else:
            high = middle
    return -1
