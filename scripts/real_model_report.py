"""The report on a run of scripts/real_model.sh: a page, JSON and tables in the terminal.

    python scripts/real_model_report.py verl_checkpoints/real_model-seed0

    <run>/validation.jsonl of each evaluation, and
    grpo_test/evaluations.jsonl of controls   -> means over questions with bootstrap intervals -> results.json
    <run>/trajectories, grpo/curves.png       -> the same questions, asked before and after    -> results.html

Intervals are of 95 %, over the questions: 10,000 times as many questions are drawn as there are, with
replacement. A difference of two models is taken question by question, so it has an interval of its own.
"""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data_prep.files import run_command
from verl.records.figures import mean_with_interval
from verl.records.trajectories import TrajectoryFolder, write_page
from verl.utils.json_files import read_lines, to_json, write_text_atomically

MODELS = {"few_shot_test": "untrained, 2 examples", "sft_test": "supervised start", "grpo_test": "GRPO"}
CONTROLS = {
    "no_search": "GRPO, searches forbidden",
    "val/shuffled": "GRPO, passages of other questions",
    "val/empty": "GRPO, nothing is ever found",
}
LABELS = MODELS | CONTROLS
# run -> the run that it is compared with
BEFORE = {"sft_test": "few_shot_test", "grpo_test": "sft_test"} | dict.fromkeys(CONTROLS, "grpo_test")
# data_source -> title of the set
SETS = {"squad": "test questions", "hotpotqa": "2 hops, HotpotQA", "films": "2 hops, films and directors"}
COLUMNS = ["model", "EM", "F1", "searches", "answer was found", "change of EM", "change of F1", "questions"]
SHOWN_QUESTIONS = 40

Results = dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]]  # set -> mode -> run -> question -> line


def read_results(folder: Path) -> Results:
    """Read the lines of all finished evaluations.

    Raises ValueError if the evaluation of GRPO is not finished.
    """
    results: Results = {}
    for run in LABELS:
        if (folder / run / "summary.json").is_file():  # a run that was killed has none
            for line in read_lines(folder / run / "validation.jsonl"):
                modes = results.setdefault(line["data_source"], {})
                add_line(modes.setdefault(line["mode"], {}).setdefault(run, {}), line)
    if (folder / "grpo_test" / "summary.json").is_file():
        for line in read_lines(folder / "grpo_test" / "evaluations.jsonl"):
            modes = results.setdefault(line["data_source"], {})
            add_line(modes.setdefault("greedy", {}).setdefault(line["eval"], {}), line)
    if "grpo_test" not in results.get("squad", {}).get("greedy", {}):
        raise ValueError(f"{folder}: found no finished evaluation grpo_test; expected a run of real_model.sh")
    return results


def add_line(known: dict[str, Any], line: dict[str, Any]) -> None:
    """Add a line under its question and a number.

    The number tells repeated questions apart, which are of two articles and have two answers.
    """
    number = 1
    while (key := f"{line['question']} ({number})") in known:
        number += 1
    known[key] = line


def compare(lines: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of one model and mode.

    They are EM and F1, and by how much they differ from another model's on the same questions, with
    intervals; and as means, searches and how often the documents held an answer.
    """
    figures: dict[str, Any] = {"questions": len(lines)}
    for name in ("em", "f1"):
        figures[name] = mean_with_interval(np.array([line[name] for line in lines.values()]))
        if before is not None:
            changes = [lines[q][name] - before[q][name] for q in lines if q in before]
            figures[f"{name}_change"] = mean_with_interval(np.array(changes))
    for name in ("searches", "documents_hold_answer"):
        figures[name] = float(np.mean([line[name] for line in lines.values()]))
    return figures


def table(title: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """Print a table, and return it for the page."""
    print(f"\n{title}\n{pd.DataFrame(rows, columns=columns).to_string(index=False)}")
    return {"title": title, "columns": columns, "rows": rows}


def format_interval(values: list[float] | None, sign: str = "") -> str:
    return "" if values is None else f"{values[0]:{sign}.3f} [{values[1]:{sign}.3f}, {values[2]:{sign}.3f}]"


def report(folder: Path) -> None:
    """Write results.json and results.html into the folder, and print the tables."""
    numbers: dict[str, Any] = {"results": {}, "seconds": {}}
    tables = []
    for questions, modes in read_results(folder).items():
        for mode, runs in modes.items():
            rows = []
            for run, lines in runs.items():
                figures = compare(lines, runs.get(BEFORE.get(run, "")))
                numbers["results"].setdefault(questions, {}).setdefault(mode, {})[run] = figures
                row = [
                    LABELS[run],
                    format_interval(figures["em"]),
                    format_interval(figures["f1"]),
                    f"{figures['searches']:.2f}",
                ]
                row.append(f"{figures['documents_hold_answer']:.3f}")
                row.append(format_interval(figures.get("em_change"), "+"))
                row.append(format_interval(figures.get("f1_change"), "+"))
                rows.append([*row, str(figures["questions"])])
            tables.append(table(f"{SETS[questions]}, {mode}", COLUMNS, rows))
    for line in (folder / "seconds.txt").read_text(encoding="utf-8").splitlines():
        stage, seconds = line.rsplit(" ", 1)  # a stage that was killed and resumed has several lines
        numbers["seconds"][stage] = numbers["seconds"].get(stage, 0) + int(seconds)
    spent = numbers["seconds"]
    rows = [[stage, f"{seconds / 60:.1f}"] for stage, seconds in spent.items()]
    rows += [["all", f"{sum(spent.values()) / 60:.1f}"]]
    tables.append(table("minutes of each stage", ["stage", "minutes"], rows))

    records = []
    for run, label in MODELS.items():
        model_records = TrajectoryFolder(folder / run / "trajectories").read(SHOWN_QUESTIONS)
        records += [record | {"model": label} for record in model_records]
    image = folder / "grpo" / "curves.png"
    curve = base64.b64encode(image.read_bytes()).decode() if image.is_file() else None
    page_results = {"tables": tables, "image": curve and f"data:image/png;base64,{curve}"}
    write_text_atomically(folder / "results.json", to_json(numbers, indent=1) + "\n")
    write_page(records, folder / "results.html", folder.name, page_results)
    print(f"\n{folder / 'results.json'}\n{folder / 'results.html'}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Tables, page and JSON of a run of scripts/real_model.sh.")
    parser.add_argument("folder", type=Path, help="the run's folder below verl_checkpoints/")
    return run_command(parser, lambda options: report(options.folder))


if __name__ == "__main__":
    sys.exit(main())
