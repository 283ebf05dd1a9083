"""Supervised training as a program: what it leaves, that a killed run goes on, and what it refuses."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from verl.trainer.fsdp_sft_trainer import run
from verl.trainer.ppo.stop_request import StopRequest
from verl.utils.json_files import MetricsFile

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "data_prep" / "base_model_plain"
QUESTION = "Question: Who directed Amber Harbor?\n"
NAMES = ["Bratis Gildane", "Pronin Brelden", "Koke Quelmaw", "Mimi Kaskaw", "Komis Quexaw"]


def demonstration(i: int) -> list[dict]:
    name = NAMES[i % len(NAMES)]
    other = NAMES[(i + 1) % len(NAMES)]
    observation = f'\n\n<information>Doc 1(Title: "Amber Harbor") Its director is {name}.</information>\n\n'
    pieces = [(QUESTION * (1 + i % 2), False), ("<search> Amber Harbor</search>", True), (observation, False)]
    pieces += [(f"<search> {other}</search>", True), (observation, False)] * (i % 3 == 0)
    return [{"text": t, "trained": m} for t, m in [*pieces, (f"<answer> {name}</answer>", True)]]


@pytest.fixture
def line(tmp_path):
    """The command line of a run of 4 steps; `run_dir` is where it writes."""
    for name, numbers in (("train", range(14)), ("val", range(14, 19))):
        rows = [{"segments": demonstration(i)} for i in numbers]
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"model.partial_pretrain={MODEL}",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.segments_key=segments",
        "data.train_batch_size=6",
        "optim.lr=1e-2",
        "trainer.total_epochs=2",
        "trainer.save_freq=1",
        "trainer.device=cpu",
        "trainer.progress=plain",
    ]


def metrics(run_dir: Path, *names: str) -> list[dict]:
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "train/loss", "train/grad_norm", "train/lr", "val/loss", *names)
    return [{name: row[name] for name in kept if name in row} for row in lines]


def weights(run_dir: Path) -> dict:
    return load_file(run_dir / "huggingface" / "model.safetensors")


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def test_a_run_leaves_a_model_that_a_reinforcement_run_can_start_from_and_its_records(line, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert run(line) == 0
    rows = metrics(run_dir, "train/epoch")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]  # two epochs of two batches; 2 rows wait
    assert [row["train/epoch"] for row in rows[1:]] == [0, 0, 1, 1]
    assert rows[4]["val/loss"] < rows[0]["val/loss"] - 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["val_loss_after"] == rows[4]["val/loss"]
    for name in ("config.json", "tokenizer.json"):
        assert (run_dir / "huggingface" / name).is_file()
    assert (run_dir / "huggingface" / "prompt_template.txt").read_text() == "Question: {question}\n"
    assert not same(weights(run_dir), load_file(MODEL / "model.safetensors"))
    assert sorted(p.name for p in run_dir.glob("global_step_*")) == [f"global_step_{i}" for i in (2, 3, 4)]
    out = capsys.readouterr().out
    assert "training: 14 rows" in out and "step 4/4  loss" in out and str(run_dir / "huggingface") in out


def test_rule_10_a_killed_run_goes_on_to_the_same_numbers_and_weights(line, tmp_path):
    run_dir = tmp_path / "run"
    assert run(line) == 0
    whole = metrics(run_dir)
    model = weights(run_dir)

    # As a kill leaves it that comes while step 4 is written: its line is there, its checkpoint is not whole.
    shutil.rmtree(run_dir / "huggingface")
    shutil.rmtree(run_dir / "global_step_3")
    (run_dir / "global_step_4").rename(run_dir / "global_step_4.incomplete")
    assert run(line) == 0
    assert metrics(run_dir) == whole and same(weights(run_dir), model)
    assert not list(run_dir.glob("*.incomplete"))

    # After the last checkpoint, before the model has its place: nothing is trained, the model is put there.
    shutil.rmtree(run_dir / "huggingface")
    (run_dir / "huggingface.incomplete").mkdir()
    assert run(line) == 0
    assert metrics(run_dir) == whole and same(weights(run_dir), model)


def test_a_request_to_stop_writes_a_checkpoint_and_the_same_command_goes_on(
    line, tmp_path, monkeypatch, capsys
):
    request = StopRequest()
    monkeypatch.setattr(StopRequest, "listen", lambda self: request)
    request.asked = True
    assert run([*line, "trainer.save_freq=-1"]) == 3
    assert "stopped: asked to stop; the checkpoint of step 1 is written" in capsys.readouterr().err
    request.asked = False
    assert run(line) == 0
    steps = [row["step"] for row in metrics(tmp_path / "run")]
    assert steps == sorted(set(steps)) and 1 in steps


def test_a_disk_that_is_full_is_one_line_and_keeps_the_finished_steps(line, tmp_path, monkeypatch, capsys):
    append = MetricsFile.append

    def fail_at_step_2(self, step, figures):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        append(self, step, figures)

    monkeypatch.setattr(MetricsFile, "append", fail_at_step_2)
    assert run([*line, "trainer.save_freq=-1"]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "metrics.jsonl: No space left on device" in error
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.max_length=12"], "14 of 14 rows that can't be trained on: train.parquet, row 0: "),
        (["data.segments_key=pieces"], "Found no column pieces"),
        (["data.max_lenght=12"], "nearest known key is 'data.max_length'"),
        (["model.partial_pretrain=/nowhere"], "Found no folder at model.partial_pretrain=/nowhere"),
        (["optim.lr_scheduler=wsd"], "expected one of: constant, cosine, linear"),
        (["trainer.default_local_dir=/proc/run"], "[writable] run folder: /proc/run can't be written"),
        (["trainer.doctor_skip=[home,writeable]"], "did you mean writable?"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(line, tmp_path, capsys, overrides, words):
    assert run([*line, "trainer.doctor_skip=[home]", *overrides]) == 2  # the machine's own state is not asked
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_words_than_the_embedding_has_rows_is_refused(line, tmp_path, capsys):
    model = shutil.copytree(MODEL, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(model)
    assert run([*line, "trainer.doctor_skip=[home]", f"model.partial_pretrain={model}"]) == 2
    error = capsys.readouterr().err
    assert "the first: '<tool>' with the id " in error
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_a_mistake_in_the_settings_is_told_before_torch_is_imported():
    code = (
        "import sys; from verl.trainer.fsdp_sft_trainer import run; "
        "assert run(['trainer.sede=1']) == 2 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_chat_template_that_was_given_is_saved_with_the_model(line, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"question": QUESTION, "answer": "Bratis Gildane"}] * 6
    pd.DataFrame(rows).to_parquet(tmp_path / "pairs.parquet")
    flags = [
        f"data.train_files={tmp_path}/pairs.parquet", "data.val_files=null", "data.segments_key=null",
        f"data.chat_template={template}", "trainer.total_epochs=1",
    ]  # fmt: skip
    assert run([*line, *flags]) == 0
    saved = tmp_path / "run" / "huggingface"
    text = "".join(path.read_text() for path in saved.glob("*") if path.suffix in (".json", ".jinja"))
    assert "{{ m.content }}" in text


@pytest.mark.slow
@pytest.mark.ray
def test_rule_5_two_processes_train_the_same_model_as_one(line, tmp_path):
    flags = ["data.train_batch_size=7", "trainer.total_epochs=1"]  # 7 rows on 2 ranks: one is filled up
    assert run([*line, *flags]) == 0
    two = [*flags, f"trainer.default_local_dir={tmp_path}/two", "trainer.n_gpus_per_node=2"]
    assert run([*line, *two]) == 0
    for left, right in zip(metrics(tmp_path / "run"), metrics(tmp_path / "two"), strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    left = weights(tmp_path / "run")
    right = weights(tmp_path / "two")
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-3
