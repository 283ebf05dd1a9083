"""Rollouts become rows that train."""

import json

import pyarrow.parquet as pq
import pytest
from test_api_models import Api, flags, questions  # noqa: F401  (a fixture)

from data_prep.corpus_questions import parse_question
from verl.config.loading import load_sft_config
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.synthesis.__main__ import main
from verl.synthesis.rows import choose, segments_of
from verl.utils import hf_tokenizer
from verl.utils.reward_score.qa_em import compute_score_em


def line(example, rollout, reward, completion="x", length=3):
    known = {"example_id": example, "rollout_idx": rollout, "reward": reward, "prompt": f"Q{example} "}
    return known | {"completion": completion, "completion_len": length}


def test_the_best_and_shortest_are_kept_once_and_the_others_say_why():
    lines = [
        line(0, 0, 1.0, "long way", 9),
        line(0, 1, 1.0, "short way", 4),
        line(0, 2, 1.0, "Short  WAY", 5),
        line(0, 3, 0.0, "no"),
        line(0, 4, None, "who knows"),
        line(1, 0, 0.5, "half"),
    ]
    kept, rejected = choose(lines, "passed", per_prompt=2, solved_at=1.0)
    assert [(x["example_id"], x["rollout_idx"]) for x in kept] == [(0, 1), (0, 0)]
    assert {(x["example_id"], x["rollout_idx"]): x["rejected"] for x in rejected} == {
        (0, 2): "a duplicate",
        (0, 3): "reward 0",
        (0, 4): "unverified",
        (1, 0): "reward 0.5",
    }
    kept, rejected = choose(lines, "best", per_prompt=1, solved_at=1.0)
    assert [(x["example_id"], x["rollout_idx"]) for x in kept] == [(0, 1), (1, 0)]
    assert len(choose(lines, "all", per_prompt=9, solved_at=1.0)[0]) == 5


def test_a_rollout_is_cut_where_the_policy_and_others_take_turns():
    row = {"prompt": "Q ", "tokens": ["<search>", " a", "obs", "<answer>", "b", "<|end|>"]}
    segments = segments_of(row | {"token_mask": [1, 1, 0, 1, 1, 1]}, "<|end|>")
    assert [(each["text"], each["trained"]) for each in segments] == [
        ("Q ", False),
        ("<search> a", True),
        ("obs", False),
        ("<answer>b", True),
    ]


def test_rows_of_a_model_train_and_verify_again(questions, tmp_path):  # noqa: F811
    with Api() as api:
        assert main([*flags(api, questions), "--val_share", "0.34", "--rollouts", "2"]) == 0
    folder = questions.parent / "evals" / "some--model" / "numbers"
    rows = [
        row for part in ("train", "val") for row in pq.read_table(folder / f"sft_{part}.parquet").to_pylist()
    ]
    assert len(rows) == 3 and len({row["example_id"] for row in rows}) == 3
    prompts = {
        row["extra_info"]["question"]: row for row in pq.read_table(folder / "train.parquet").to_pylist()
    }
    assert set(prompts) == {f"What is {i}?" for i in (1, 2, 3)}
    for row in rows:
        assert [each["role"] for each in row["messages"]] == ["user", "assistant"]
        text = row["messages"][1]["content"]
        assert compute_score_em(text, prompts[row["question"]]["reward_model"]["ground_truth"]) == 1.0
        assert row["model"] == "some--model" and json.loads(row["usage"])["prompt_tokens"] == 1000
    rejected = [json.loads(each) for each in (folder / "rejected.jsonl").read_text().splitlines()]
    assert sorted(each["rejected"] for each in rejected) == ["a duplicate"] * 3 + ["reward 0"] * 2
    tokenizer = hf_tokenizer("data_prep/base_model")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    config = load_sft_config(
        ["data.segments_key=null", "data.multiturn.enable=true", "data.max_length=512"]
    ).data
    assert len(SFTDataset(str(folder / "sft_train.parquet"), tokenizer, config)) == 2
    data = {"max_start_length": 200, "max_prompt_length": 500, "env_class": "search"}
    assert len(RLHFDataset(str(folder / "train.parquet"), tokenizer, data)) == 3


PASSAGES = {
    "Amber Harbor": "Amber Harbor is a film of 1931. Ida Voss directed it.",
    "Orlen": "Orlen is a town on the river Sava.",
    "Kite": "A kite flies.",
    "Sava": "The Sava is a river.",
    "Twin": "Ida Voss directed Amber Harbor too.",
}
WRITTEN = {
    "Amber Harbor": "<question>Who directed Amber Harbor?</question> <answer>Ida Voss",
    "Orlen": "Sure! <question>On which river does Orlen lie?</question>\n<answer>the Sava",
    "Kite": "<question>What flies?</question><answer>a red kite",
    "Sava": "It is about a river.",
    "Twin": "<question>who directed amber harbor</question><answer>Ida Voss",
}
REPLIES = {
    "Who directed Amber Harbor?": "<answer>Ida Voss",
    "On which river does Orlen lie?": "<answer>Drava",
}


def reply(content):
    if "Passage: " in content:
        title = content.partition('Passage: "')[2].partition('"')[0]
        return WRITTEN[title]
    return next(text for question, text in REPLIES.items() if question in content)


def test_a_model_asks_questions_on_passages_and_those_that_it_can_answer_are_kept(tmp_path, capsys):
    corpus = tmp_path / "small.jsonl"
    contents = [f'"{title}"\n{text}' for title, text in PASSAGES.items()]
    lines = [json.dumps({"id": f"{i}", "contents": text}) + "\n" for i, text in enumerate(contents)]
    corpus.write_text("".join(lines))
    out = tmp_path / "out"
    with Api(says=reply) as api:
        asked = ["--base_url", api.url, "--model", "m", "--out", str(out), "--rollouts", "2"]
        asked += ["--corpus", str(corpus), "-n", "9", "--val_share", "0", "do_search=false"]
        assert main(asked) == 0
        number = len(api.bodies)
        assert number == len(PASSAGES) + 2 * 2
        assert main([*asked, "--resume"]) == 0 and len(api.bodies) == number
    assert "2 questions on 5 passages" in capsys.readouterr().out
    why = [json.loads(each) for each in (out / "m" / "small" / "rejected.jsonl").read_text().splitlines()]
    assert [each["rejected"] for each in why] == [
        "the answer is not in the passage",
        "no <question>..</question><answer>..</answer>",
        "a duplicate",
    ]
    (kept,) = pq.read_table(out / "m" / "small_questions" / "train.parquet").to_pylist()
    assert kept["golden_answers"] == ["Ida Voss"] and kept["question"] == "Who directed Amber Harbor?"
    assert kept["extra_info"]["gold_titles"] == ["Amber Harbor"] and kept["synthesized_by"] == "m"
    (shown,) = pq.read_table(out / "m" / "small_questions" / "sft_train.parquet").to_pylist()
    assert compute_score_em(shown["messages"][1]["content"], kept["reward_model"]["ground_truth"]) == 1.0


@pytest.mark.parametrize(
    "text, wrong",
    [
        (
            "<question>Who?</question><answer>one two three four five six seven eight nine</answer>",
            "more than 8",
        ),
        ("<question>Who?</question><answer> the </answer>", "no words"),
        ("<question>Is Orlen a town?</question><answer>town</answer>", "tells its answer"),
        ("<question>What lies on the Sava?</question><answer>Orlen</answer>", ""),
        ("<question>draft</question> no: <question>What lies on the Sava?</question><answer>Orlen", "no <q"),
    ],
)
def test_what_is_no_question(text, wrong):
    question, _, found = parse_question(text, PASSAGES["Orlen"])
    assert "draft" not in question
    assert wrong in found and bool(wrong) == bool(found)


def test_nothing_kept_is_said(questions, capsys):  # noqa: F811
    with Api() as api:
        assert main([*flags(api, questions), "--solved_at", "2"]) == 2
    assert "none of 16 rollouts is kept" in capsys.readouterr().err


def test_mistakes_are_refused(questions, capsys):  # noqa: F811
    with Api() as api, pytest.raises(SystemExit):
        main([*flags(api, questions), "--val_share", "1"])
    assert "--val_share" in capsys.readouterr().err
    rows = ["--benchmarks", str(questions)]
    corpus = ["--corpus", "corpus.jsonl"]
    for wrong, said in (
        ([], "--benchmarks or --corpus"),
        ([*rows, *corpus], "--benchmarks or --corpus"),
        (corpus, "--corpus with -n"),
        ([*corpus, "-n", "2", "--watch"], "without --steps and --watch"),
        ([*rows, "--template", "x"], "--template with --corpus"),
    ):
        with pytest.raises(SystemExit):
            main(["--model", "m", *wrong])
        assert said in capsys.readouterr().err
