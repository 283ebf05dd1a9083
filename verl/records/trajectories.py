"""Trajectories as records that a person can read, and the files they are kept in.

    batch row -> {step, split, uid, data_source, question, gold, answer, em, f1, score, extra_info,
                  trajectory, tokens: [str], token_mask: [0 or 1]} -> trajectories/step_N.jsonl

`tokens` joined are the response's text. `token_mask` says which of them the policy sampled; in training,
these are the tokens that are trained.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.records.figures import UNKNOWN_REWARD_REASONS
from verl.utils.json_files import append_whole, read_lines, to_json, write_text_atomically
from verl.utils.reward_score.qa_em import em_check, extract_solution, f1_check, golden_answers

if TYPE_CHECKING:
    from verl.protocol import DataProto

_QUESTION = re.compile(r"Question:[ \t]*(.+)")
_BROKEN = "\ufffd"


class TokenTexts:
    """The texts of single tokens; joined, they read as the decoded sequence does.

    A token that is only a part of a letter (byte-level vocabularies have such tokens) has its text with the
    last token of that letter. If parts make no letter, the last of them decides: U+FFFD may itself be a
    letter.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Some tokenizers drop the space before a first word, so tokens are decoded after another one.
        self.anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self.anchor_text = self._decode(self.anchor)
        self.texts: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> list[str]:
        """Return one text for each id."""
        texts = [self._single(token) for token in ids]
        start = None
        for i, text in enumerate(texts):
            if _BROKEN not in text:
                start = None
                continue
            start = i if start is None else start
            letter = self._after_anchor(ids[start : i + 1])
            texts[start : i + 1] = [""] * (i - start) + [letter]
            if not letter.endswith(_BROKEN):
                start = None
        return texts

    def _single(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = self._after_anchor([token])
        return self.texts[token]

    def _after_anchor(self, ids: list[int]) -> str:
        return self._decode(self.anchor + ids)[len(self.anchor_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def trajectory_records(
    batch: DataProto, texts: TokenTexts, step: int, split: str, count: int
) -> list[dict[str, Any]]:
    """Return records of at most `count` rows, spread evenly over the batch.

    `split` is "train" or "val". The score of a trajectory that could not be judged is None.
    """
    assert batch.batch is not None
    tensors = batch.batch
    fields = batch.non_tensor_batch
    width = tensors["responses"].shape[1]
    records = []
    for i in spread_rows(len(batch), count):
        length = int(tensors["attention_mask"][i, -width:].sum())
        trajectory = fields["trajectory"][i]
        extra_info = fields["extra_info"][i]
        try:
            gold = golden_answers(fields["reward_model"][i]["ground_truth"])
        except ValueError:  # the ground truth of a user's own reward is shown as it is
            gold = [str(fields["reward_model"][i]["ground_truth"])]
        answer = extract_solution(trajectory["policy_text"])
        is_lost = trajectory["finish_reason"] in UNKNOWN_REWARD_REASONS
        records.append(
            {
                "step": step,
                "split": split,
                "uid": fields["uid"][i],
                "data_source": fields["data_source"][i],
                "question": extra_info.get("question") or find_question(trajectory["prompt_text"]),
                "gold": gold,
                "answer": answer,
                "em": 0 if answer is None else em_check(answer, gold),
                "f1": 0.0 if answer is None else f1_check(answer, gold),
                "score": None if is_lost else float(tensors["token_level_scores"][i].sum()),
                "extra_info": extra_info,
                "trajectory": trajectory,
                "tokens": texts(tensors["responses"][i, :length].tolist()),
                "token_mask": tensors["response_mask"][i, :length].tolist(),
            }
        )
        if "verdicts" in fields and fields["verdicts"][i] is not None:
            records[-1]["verdicts"] = fields["verdicts"][i]
    return records


def spread_rows(length: int, count: int) -> list[int]:
    """Return at most `count` indices below `length`, evenly spaced."""
    return sorted(set(np.linspace(0, length - 1, min(count, length)).astype(int).tolist()))


def find_question(prompt: str) -> str:
    """Return the question in a prompt: what follows the last "Question:", else the last line with text."""
    questions = _QUESTION.findall(prompt)
    if questions:
        return questions[-1].strip()
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class TrajectoryFolder:
    """The files `trajectories/step_N.jsonl`, one file a step, one record a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, step: int, records: list[dict[str, Any]]) -> None:
        if records:
            self.path.mkdir(parents=True, exist_ok=True)
            append_whole(self._file(step), "".join(to_json(record) + "\n" for record in records))

    def cut_after(self, step: int) -> None:
        """Delete the files of later steps, because a resumed run writes those again; -1 deletes all."""
        for file_step in self.steps():
            if file_step > step:
                self._file(file_step).unlink()

    def copy_after(self, step: int, folder: Path) -> None:
        """Copy the files of later steps into a folder, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        for file_step in self.steps():
            if file_step > step:
                shutil.copy2(self._file(file_step), folder)

    def steps(self) -> list[int]:
        """Return the steps that have a file, ascending."""
        names = (re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in self.path.glob("step_*.jsonl"))
        return sorted(int(match.group(1)) for match in names if match)

    def read(self, limit: int) -> list[dict[str, Any]]:
        """Return at most `limit` records.

        Up to half of them are the last validation ones, the others are spread over the run.
        """
        steps = self.steps()
        records = [record for step in steps for record in read_lines(self._file(step))]
        if len(records) <= limit:
            return records
        validation = [record for record in records if record["split"] != "train"][-limit // 2 :]
        train = [record for record in records if record["split"] == "train"]
        picked = [train[i] for i in spread_rows(len(train), limit - len(validation))]
        return sorted(picked + validation, key=lambda record: (record["step"], record["split"]))

    def _file(self, step: int) -> Path:
        return self.path / f"step_{step}.jsonl"


def write_page(
    records: list[dict[str, Any]], path: Path, title: str, results: dict[str, Any] | None = None
) -> None:
    """Write the self-contained page `trajectories.html`, which loads nothing from anywhere.

    Records of several models have the model's name under `model`. Those of one question stand side by side.

    The records go in as JSON in which no "<" is left, so that no text can end the element that holds it. The
    page puts them on the screen as text only.

    Args:
        records: what `trajectory_records` returns.
        path: the file to write.
        title: title of the page.
        results: what the page shows first: `tables` ({title, columns, rows of text}) and `image` (a data
            URL).
    """
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    data = to_json({"title": title, "records": records, "results": results})
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    write_text_atomically(path, template.replace("@@DATA@@", data))
