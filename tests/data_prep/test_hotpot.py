"""Questions of two hops: those whose two passages a corpus has; those made of films and their directors."""

import json

import pandas as pd
import pytest

from data_prep.hotpot import convert
from data_prep.prompts import BASE_PROMPT, fill_prompt

PASSAGES = {
    "Amber Harbor": "Amber Harbor is a 1931 British crime film directed by Ada Byrne and starring Tom Low.",
    "Amber Harbor (novel)": "Amber Harbor is a novel. It is not by Ada Byrne.",
    "Ada Byrne": "Ada Maria Byrne( 3 May 190127 June 1980) was a director, born in Cork to Leo Byrne.",
    "Leo Byrne": "Leo Byrne (1870 – 1930) was a painter.",
    "Two Roads": "Two Roads, also called One Road, is a 1940 film written and directed by Leo Byrne.",
    "Both of Them": "Both of Them is a 1950 film directed by Ada Byrne and Leo Byrne.",
    "Ada Byrne Again": "Ada Byrne Again is a 1990 Irish film, directed by Nobody Known.",
    "An Actor": 'An Actor (born 1920) is an actress, best known for the film "It", directed by Leo Byrne.',
    "It (film)": "It is a film directed by Sam Twin.",
    "Sam Twin": "Sam Twin (born 1950) directs.",
    "Sam Twin (singer)": "Sam Twin (born 1960) sings.",
}
HOTPOT = [
    ("Who is older, Ada Byrne or Leo Byrne?", "Leo Byrne", "comparison", ["Ada Byrne", "Leo Byrne"]),
    ("Are Ada Byrne and Rome the same?", "no", "comparison", None),
    ("Where was the woman born who made Amber Harbor?", "Cork", "bridge", ["Amber Harbor", "Ada Byrne"]),
    ("Which director's father was Leo Byrne", "Ada Maria Byrne", "bridge", ["Leo Byrne", "Ada Byrne"]),
    ("What is a film directed by Ada Byrne about?", "Paris", "bridge", None),
    ("Where was Ada Byrne born?", "Cork", "bridge", None),  # one passage says it
    ("Who is An Acto", "best", "bridge", None),
    ("Is It good?", "actress", "bridge", None),  # a single word without quotation marks
]


@pytest.fixture
def corpus(tmp_path):
    lines = [
        json.dumps({"id": f"p{i}", "contents": f'"{title}"\n{text}'})
        for i, (title, text) in enumerate(PASSAGES.items())
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus.jsonl"


def questions(folder, rows):
    path = folder / "questions.json"
    path.write_text(
        json.dumps([dict(zip(("question", "answer", "type"), row, strict=False)) for row in rows])
    )
    return path


def read(path):
    return pd.read_parquet(path).to_dict("records")


def titles(row):
    return [list(PASSAGES)[int(number[1:])] for number in row["extra_info"]["gold_ids"]]


def test_a_question_of_hotpot_is_kept_if_both_of_its_passages_are_there(corpus, tmp_path, capsys):
    counts = convert(corpus, questions(tmp_path, HOTPOT), tmp_path / "out", BASE_PROMPT)
    rows = read(tmp_path / "out" / "test_2hop.parquet")
    found = {row["question"].rstrip("?"): titles(row) for row in rows}
    assert found == {question.rstrip("?"): gold for question, _, _, gold in HOTPOT if gold}
    assert counts["test_2hop.parquet"] == len(rows) == 3
    assert {row["data_source"] for row in rows} == {"hotpotqa"}
    assert rows[0]["prompt"][0]["content"] == fill_prompt(BASE_PROMPT, rows[0]["question"])
    said = "comparison: 1 of 2 questions have both passages, bridge: 2 of 6 questions have both passages\n"
    assert capsys.readouterr().out == said


def test_a_film_asks_for_the_year_of_its_only_director(corpus, tmp_path):
    (tmp_path / "test_2hop.parquet").write_bytes(b"of an earlier command")
    unanswerable = questions(tmp_path, [("Who?", "x", "bridge")])
    assert convert(corpus, unanswerable, tmp_path, BASE_PROMPT) == {"test_films.parquet": 2}
    assert not (tmp_path / "test_2hop.parquet").exists()
    rows = read(tmp_path / "test_films.parquet")
    assert [(titles(row), list(row["golden_answers"])) for row in rows] == [
        (["Amber Harbor", "Ada Byrne"], ["1901"]),
        (["Two Roads", "Leo Byrne"], ["1870"]),
    ]
    assert rows[0]["question"] == "In what year was the director of Amber Harbor born?"
    assert list(rows[0]["extra_info"]["gold_titles"]) == ["Amber Harbor", "Ada Byrne"]


def test_mistakes_are_named_with_their_place(corpus, tmp_path):
    for row, message in (
        (
            ("Who?", "x", "yes/no"),
            r"questions.json, \[0\]: expected a question, an answer and one of the types",
        ),
        (("Who?", 5, "bridge"), r"\[0\]: 'answer' must be a str, found int 5"),
        (("Who?", " ", "bridge"), r"\[0\]: expected a question, an answer"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(corpus, questions(tmp_path, [row]), tmp_path, BASE_PROMPT)
    (tmp_path / "empty.jsonl").write_text(json.dumps({"id": "1", "contents": '"A"\nB.'}))
    with pytest.raises(ValueError, match="has no film with its director"):
        convert(tmp_path / "empty.jsonl", None, tmp_path, BASE_PROMPT)
