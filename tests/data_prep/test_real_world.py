"""The small real world: four files become a corpus and rows; other versions of the files are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from data_prep import real_world

DATA = Path(__file__).parents[3] / "shared" / "data"


def write_small_files(folder: Path) -> None:
    folder.mkdir()
    entry = {"id": "q", "question": "Where?", "answers": [{"text": "Here"}]}
    paragraph = {"context": "Here it is.", "qas": [entry, entry | {"id": "p", "question": "Which place"}]}
    squad = {"data": [{"title": "T", "paragraphs": [paragraph]}]}
    (folder / real_world.XQUAD).write_text(json.dumps(squad))
    (folder / real_world.PASSAGES).write_text(json.dumps([{"title": "U", "text": "Other."}]))
    lines = [json.dumps({"question": f"q{i}", "answer": ["A"]}) for i in range(4)]
    (folder / "NQ-open.dev.jsonl").write_text("\n".join(lines))
    hotpot = [{"question": f"q{i}", "answer": "A", "type": "bridge"} for i in range(8)]
    (folder / "hotpot_dev_v1_simplified.json").write_text(json.dumps(hotpot))


def test_four_files_become_a_corpus_and_rows(tmp_path, capsys):
    write_small_files(tmp_path / "files")
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        real_world.main(["--files", str(tmp_path / "files"), "--out", str(out)])
    assert ended.value.code == 1
    assert "expected {'passages': 6359" in capsys.readouterr().err
    assert len((out / "corpus.jsonl").read_text().splitlines()) == 2
    assert list(pd.read_parquet(out / "train.parquet").extra_info[0]["gold_ids"]) == ["0"]
    frames = [pd.read_parquet(out / "nq_hotpotqa" / f"{split}.parquet") for split in ("train", "test")]
    assert [list(frame.data_source).count("hotpotqa") for frame in frames] == [6, 2]
    assert [list(frame.data_source).count("nq") for frame in frames] == [3, 1]
    both = pd.concat(frames)
    assert both.id.is_unique
    assert sorted(both[both.data_source == "nq"].question) == ["q0?", "q1?", "q2?", "q3?"]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the data sets are not in {DATA}")
def test_the_published_files_give_6359_passages(tmp_path, capsys):
    real_world.main(["--files", str(DATA), "--out", str(tmp_path)])
    assert "passages: 6,359\nXQuAD questions: 1,190\n" in capsys.readouterr().out
    with (tmp_path / "corpus.jsonl").open(encoding="utf-8") as corpus:
        assert sum(1 for _ in corpus) == 6359
