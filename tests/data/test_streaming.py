"""Rows that are read while the run goes on: each once an epoch, in an order that survives a restart."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_rl_dataset import ByteTokenizer

from verl.config import load_config, replace_values
from verl.data import streaming
from verl.data.mixture import prompt_sampler, training_rows
from verl.data.rl_dataset import DataFailed

KINDS = ("one group", "many groups", "jsonl")


def rows_of(count: int) -> list[dict]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{i}?" + "." * (i % 50)}],
            "data_source": "nq",
            "reward_model": {"ground_truth": {"target": [str(i)]}},
        }
        for i in range(count)
    ]


def write(folder: Path, kind: str, count: int) -> str:
    path = folder / ("rows.jsonl" if kind == "jsonl" else "rows.parquet")
    if kind == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows_of(count))))
    elif kind == "one group":
        pd.DataFrame(rows_of(count)).to_parquet(path)
    else:
        pq.write_table(pa.Table.from_pylist(rows_of(count)), path, row_group_size=37)
    return str(path)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """So that a thousand rows are many windows."""
    for name, value in {"BLOCK_ROWS": 8, "PIECE_BYTES": 999, "WINDOW_ROWS": 64, "WINDOW_BYTES": 9000}.items():
        monkeypatch.setattr(streaming, name, value)


def of(path: str | Path, *settings: str):
    line = [f"data.train_files={path}", "data.train_batch_size=10", *settings, "data.max_start_length=250"]
    config = load_config(line)
    return training_rows(config, ByteTokenizer()), config


def make(path: str | Path, *settings: str):
    rows, config = of(path, "data.streaming=true", *settings)
    return rows, prompt_sampler(rows, config)


def numbers(rows, sampler, count: int) -> list[int]:
    """What is asked next: the number that each prompt begins with; its answer must be its own."""
    items = [rows[i] for i in sampler.take(count)]
    asked = [int(bytes(item["raw_prompt_ids"]).split(b"?")[0]) for item in items]
    assert [item["reward_model"]["ground_truth"]["target"] for item in items] == [[str(i)] for i in asked]
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_comes_once_an_epoch_in_another_order(tmp_path, kind):
    rows, sampler = make(write(tmp_path, kind, 1000))
    first, second = (sum((numbers(rows, sampler, 10) for _ in range(100)), []) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(1000)) and first != second
    places = np.abs(np.diff(first))
    assert np.median(places) > 10 and np.corrcoef(first, np.arange(1000))[0, 1] < 0.5  # it is shuffled
    assert abs(len(rows) - 1000) <= (400 if kind == "jsonl" else 0)
    sampler.close()
    rows, sampler = make(rows.files[0], "data.shuffle_train_dataloader=false")
    assert numbers(rows, sampler, 750) + numbers(rows, sampler, 300) == [*range(1000), *range(50)]
    sampler.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [[], ["data.train_data_num=130"]])
def test_rule_10_a_restart_gives_the_same_rows(tmp_path, kind, more):
    settings = [*more, "data.truncation=skip", "data.max_prompt_length=45", "data.max_start_length=40"]
    settings += ["prompt_selection.retire_solved=0.9"]
    path = write(tmp_path, kind, 400)
    rows, sampler = make(path, *settings)
    for _ in range(17):
        taken = sampler.take(10)
        sampler.record(taken, np.arange(10) / 10)
        time.sleep(0.002)  # the thread is ahead by another number of rows each time
    _, resumed = rows_again = make(path, *settings)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    resumed.load_history(sampler.history())
    goes_on = [numbers(rows, sampler, 7) for _ in range(60)]
    assert [numbers(rows_again[0], resumed, 7) for _ in range(60)] == goes_on
    assert sampler.metrics() == resumed.metrics() and sampler.metrics()["filter/retired"] > 10
    assert sampler.metrics()["data/skipped"] > 0 and all(i % 50 < 44 for row in goes_on for i in row)
    for one in (sampler, resumed):
        one.close()


def test_the_thread_is_two_steps_ahead_and_no_more(tmp_path):
    rows, sampler = make(write(tmp_path, "one group", 400))
    made = []
    encode_row = rows.encode_row
    rows.encode_row = lambda row, index: made.append(index) or encode_row(row, index)
    for step in range(1, 6):
        sampler.take(10)
        deadline = time.monotonic() + 20
        while len(made) < 10 * step + 21 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)
        assert len(made) == 10 * step + 21  # the queue is full, and one more waits for its place
    (thread,) = (each for each in threading.enumerate() if each.name.startswith("rows"))
    sampler.close()
    assert not thread.is_alive()


def test_rows_that_cant_be_used_end_the_run_when_they_are_met(tmp_path):
    path = Path(write(tmp_path, "jsonl", 30))
    path.write_text(path.read_text() + "\n{broken\n")
    rows, sampler = make(str(path), "data.shuffle_train_dataloader=false")
    assert numbers(rows, sampler, 30) == list(range(30))
    with pytest.raises(DataFailed, match=r"the training rows can't be used: .*rows.jsonl.*found no JSON"):
        sampler.take(1)
    path = write(tmp_path, "one group", 100)
    short = ["data.max_prompt_length=45", "data.max_start_length=40"]
    with pytest.raises(DataFailed, match=r"row \d+, .* data.max_prompt_length=45 .*=skip"):
        make(path, *short)[1].take(100)
    long = ["data.truncation=skip", "data.max_prompt_length=1", "data.max_start_length=1"]
    with pytest.raises(DataFailed, match="all are too long"):
        make(path, *long)[1].take(1)
    with pytest.raises(ValueError, match="no column reward_model"):
        pd.DataFrame({"prompt": ["a"], "data_source": ["b"]}).to_parquet(tmp_path / "c.parquet")
        make(str(tmp_path / "c.parquet"))


def test_when_all_are_solved_the_run_ends_and_says_so(tmp_path):
    rows, sampler = make(write(tmp_path, "jsonl", 40), "prompt_selection.retire_solved=1")
    with pytest.raises(DataFailed, match="prompts are left"):
        for _ in range(9):
            sampler.record(sampler.take(10), [1.0] * 10)
    assert len(sampler.retired) >= 40 - 10
    sampler.close()


def test_a_state_of_another_kind_is_refused(tmp_path):
    path = write(tmp_path, "one group", 40)
    held = prompt_sampler(*of(path, "data.streaming=false"))
    with pytest.raises(ValueError, match=r"another value of data.streaming"):
        held.load_state_dict(make(path)[1].state_dict())


def test_large_files_are_streamed_unless_it_is_refused(tmp_path, monkeypatch):
    path = Path(write(tmp_path, "one group", 50))
    assert not streaming.is_large([path])
    monkeypatch.setattr(streaming, "STREAMED_ROWS", 49)
    assert streaming.is_large([path])
    config = load_config([f"data.train_files={path}"])
    assert isinstance(training_rows(config, ByteTokenizer()), streaming.RowStream)
    config = replace_values(config, {"data.streaming": False})
    assert not isinstance(training_rows(config, ByteTokenizer()), streaming.RowStream)


MEASURED = """
import json, sys, time
import torch, pandas
from transformers import AutoTokenizer
from verl.config import load_config
from verl.data.mixture import prompt_sampler, training_rows

def mebibytes(kind):
    return int(next(x for x in open("/proc/self/status") if x.startswith(kind)).split()[1]) / 1024

tokenizer, base = AutoTokenizer.from_pretrained(sys.argv[1]), mebibytes("VmRSS")
for path in sys.argv[2:]:
    start = time.perf_counter()
    config = load_config([f"data.train_files={path}", "data.train_batch_size=512"])
    rows = training_rows(config, tokenizer)
    sampler = prompt_sampler(rows, config)
    assert len([rows[i] for i in sampler.take(512)]) == 512
    seconds = time.perf_counter() - start
    for _ in range(5):
        sampler.take(512)
    sampler.close()
    print(json.dumps([len(rows), seconds, mebibytes("VmHWM") - base]))
"""


@pytest.mark.slow
@pytest.mark.alone
def test_a_million_rows_start_in_10_seconds_and_500_megabytes(tmp_path):
    count = 1_000_000
    numbers_ = pa.array(np.arange(count).astype(str))
    prompts = pa.compute.binary_join_element_wise("What is the square of ", numbers_, "? Say why. " * 8, "")
    ends = pa.array(np.arange(count + 1), pa.int32())
    message = pa.StructArray.from_arrays([pa.repeat("user", count), prompts], ["role", "content"])
    truth = pa.StructArray.from_arrays([numbers_], ["ground_truth"])
    columns = {"prompt": pa.ListArray.from_arrays(ends, message), "reward_model": truth}
    table = pa.table(columns | {"data_source": pa.repeat("squares", count)})
    pq.write_table(table, tmp_path / "one.parquet")  # as pandas writes it
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=2000)
    with (tmp_path / "rows.jsonl").open("w") as file:
        start = '{"prompt": "'
        end = '", "reward_model": {"ground_truth": "1"}, "data_source": "squares"}\n'
        file.writelines(f"{start}{text}{end}" for text in prompts.to_pylist())
    assert pq.read_metadata(tmp_path / "one.parquet").num_row_groups == 1
    model = Path(__file__).parents[2] / "data_prep" / "base_model"
    paths = [str(tmp_path / name) for name in ("one.parquet", "many.parquet", "rows.jsonl")]
    line = [sys.executable, "-c", MEASURED, str(model), *paths]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    for path, printed in zip(paths, done.stdout.splitlines()[-3:], strict=True):
        found, seconds, mebibytes = json.loads(printed)
        print(f"{path}: {seconds:.2f} s to the first step, {mebibytes:.0f} MiB above the base")
        assert abs(found - count) < 0.05 * count and seconds < 10 and mebibytes < 500


@pytest.mark.parametrize("kind", KINDS)
def test_a_refill_that_crosses_an_epoch_asks_no_prompt_twice_in_a_step(tmp_path, kind):
    path = write(tmp_path, kind, 24)
    rows, sampler = make(path)
    for step in range(40):
        asked = sampler.take(10)
        asked += sampler.take(step % 7 + 1, asked)
        assert len(set(asked)) == len(asked)
    _, resumed = make(path)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [sampler.take(7, asked) for _ in range(9)] == [resumed.take(7, asked) for _ in range(9)]
    assert len(sampler.take(24, asked)) == 24  # more than there are besides
    for one in (sampler, resumed):
        one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_so_many_rows_are_the_same_ones_in_every_epoch_and_skipped_ones_are_counted_in_all(tmp_path, kind):
    settings = ["data.truncation=skip", "data.max_prompt_length=45", "data.max_start_length=40"]
    rows, sampler = make(write(tmp_path, kind, 400), "data.train_data_num=130", *settings)
    first = numbers(rows, sampler, 1)
    while sampler.cursor.epoch == 0:
        first += numbers(rows, sampler, 1)
    num_skipped = sampler.cursor.skipped
    second = [first.pop(), *numbers(rows, sampler, len(first) - 1)]  # the last one was of the next epoch
    assert second == first and len(first) + num_skipped == 130
    numbers(rows, sampler, 1)
    assert sampler.metrics()["data/skipped"] == 2 * num_skipped > 0
    sampler.close()
