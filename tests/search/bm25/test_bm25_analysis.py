"""Words and terms are Lucene's: the expected ones were printed by Anserini's DefaultEnglishAnalyzer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from search_r1.search.bm25.analysis import analyze, stem
from search_r1.search.lucene import check_java, java_class, on_java_thread

DATA = Path(__file__).parents[4] / "shared" / "data"
QUOTES_AND_DOTS = [
    ("The N.A.T.O. film's Directors", ["n.a.t.o", "film", "director"]),
    ("O’Brien's dog-house, 3.5 miles", ["o’brien", "dog", "hous", "3.5", "mile"]),
    ("snake_case __init__ _ ___ a_1", ["snake_cas", "__init__", "a_1"]),
    (
        "1,000.5 1:2 a:b 3,a b,3 10:30pm x.y.",
        ["1,000.5", *["1", "2", "a:b", "3", "b", "3", "10", "30pm", "x.y"]],
    ),
    ("it's its' 'quoted' rock'n'roll l'été", ["it", "quot", "rock'n'rol", "l'été"]),
    (
        "email@example.com http://example.com/a_b?c=d",
        ["email", *["example.com", "http", "example.com", "a_b", "c", "d"]],
    ),
    ("C++ C# .NET AT&T R2-D2", ["c", "c", "net", "t", "r2", "d2"]),
    ("Hello.World i.e. U.S.A", ["hello.world", "i.", "u.s.a"]),
    ("½ ² Ⅷ № ™ €5 50%", ["ⅷ", "™", "5", "50"]),
    ("the of and THE Not", []),
    ("foo\tbar\nbaz\r\nqux", ["foo", "bar", "baz", "qux"]),
    ("", []),
]
SCRIPTS = [
    ("ÉTÉ İstanbul ΣΊΣΥΦΟΣ straße ﬁne", ["été", "istanbul", "σίσυφοσ", "straße", "ﬁne"]),
    (
        "東京タワー ひらがな 한국어 ภาษาไทย",
        ["東", "京", "タワー", "ひ", "ら", "が", "な", "한국어", "ภาษาไทย"],
    ),
    ("😀 👍🏽 🇩🇪🇫🇷 a😀b ❤️", ["😀", "👍🏽", "🇩🇪", "🇫🇷", "😀", "b", "❤️"]),
    (
        "na\xefve cafe\u0301 co\xadoperate zero\u200bwidth no\xa0break",
        ["naïv", "cafe\u0301", "co\xadoper", "zero", "width", "break"],
    ),
    ("١٢٣ ９９ ｆｕｌｌ", ["١٢٣", "９９", "ｆｕｌｌ"]),
]


@pytest.mark.parametrize("text, terms", QUOTES_AND_DOTS + SCRIPTS)
def test_the_terms_of_a_text(text, terms):
    assert analyze(text) == terms


@pytest.mark.parametrize(
    "text, stems",
    [
        ("running ran flies dying sses yes", "run ran fli dy ss ye"),
        ("relational conditional rationalize hopefulness formative", "relat condit ration hope form"),
        ("geology apology possibly", "geologi apolog possibl"),  # Porter's later changes
        ("ay bs is by", "ay bs is by"),  # two letters stay
        ("hopping falling fizzed acced filing feed agreed", "hop fall fizz ac file feed agre"),
        ("controlling roll generate rate cease", "control roll gener rate ceas"),
        ("replacement adjustment adoption ion", "replac adjust adopt ion"),
        ("happy sky yyy toy", "happi sky yyi toi"),
    ],
)
def test_stems(text, stems):
    assert [stem(word) for word in text.split()] == stems.split()


@pytest.mark.parametrize(
    "unit", ["_", "a.", "'", "\u0301", "😀\u200d", "é_", "ア_", ".", "1,", "x", "é", "_é", "\u202f", "a_'"]
)
def test_a_long_odd_text_takes_no_time(unit):
    begun = time.perf_counter()
    analyze(unit * 16_384)
    assert time.perf_counter() - begun < 1


def lucene_terms(texts: list[str]) -> list[list[str]]:
    """What Lucene makes of the texts."""
    utils = java_class("io.anserini.analysis.AnalyzerUtils")
    analyzer = java_class("io.anserini.analysis.DefaultEnglishAnalyzer").newDefaultInstance()
    return [list(utils.analyze(analyzer, text).toArray()) for text in texts]


@pytest.fixture(scope="module")
def lucene():
    """lucene(texts): Lucene's own terms."""
    try:
        check_java()
    except ValueError as error:
        pytest.skip(str(error))
    return lambda texts: on_java_thread(lucene_terms, texts)


@pytest.mark.slow
def test_all_real_passages_and_questions_have_lucenes_terms(lucene):
    xquad = DATA / "xquad.en.json"
    passages = DATA / "2wikimultihopqa_corpus.json"
    if not xquad.exists() or not passages.exists():
        pytest.skip(f"the data sets are not in {DATA}")
    texts = [passage["text"] for passage in json.loads(passages.read_text(encoding="utf-8"))]
    for article in json.loads(xquad.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            texts += [paragraph["context"], *(qa["question"] for qa in paragraph["qas"])]
    assert len(texts) == 6119 + 240 + 1190
    assert [analyze(text) for text in texts] == lucene(texts)
