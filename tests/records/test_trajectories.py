"""Records of trajectories, and the page that shows them."""

import json
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records_data import ANSWER, SEEN, WRITTEN, SplitTokenizer, step_batch

from verl.records.figures import UNKNOWN_REWARD_REASONS
from verl.records.trajectories import (
    TokenTexts,
    TrajectoryFolder,
    find_question,
    trajectory_records,
    write_page,
)


def records_of(answers: list[str], count: int = 16, split: str = "train", step: int = 1) -> list[dict]:
    return trajectory_records(step_batch(answers), TokenTexts(SplitTokenizer()), step, split, count)


@given(st.text(max_size=30))
def test_token_texts_joined_are_the_text(text):
    texts = TokenTexts(SplitTokenizer())(list(text.encode()))
    assert len(texts) == len(text.encode())
    assert "".join(texts) == text


def test_a_record_tells_the_whole_trajectory():
    record = records_of(["Ada", "Bob"])[0]
    text = WRITTEN + SEEN + ANSWER.format("Ada")
    assert "".join(record["tokens"]) == text
    sampled = "".join(t for t, m in zip(record["tokens"], record["token_mask"], strict=True) if m)
    assert sampled == WRITTEN + ANSWER.format("Ada")
    assert record["question"] == "Who made the cheese?"
    assert (record["gold"], record["answer"], record["em"], record["score"]) == (["Ada"], "Ada", 1, 1.0)
    assert record["step"] == 1 and record["uid"] == "step1-0"


@pytest.mark.parametrize("reason", UNKNOWN_REWARD_REASONS)
def test_a_trajectory_that_could_not_be_judged_has_no_score(reason):
    batch = step_batch(["Bob", "Ada"])
    batch.non_tensor_batch["trajectory"][0]["finish_reason"] = reason
    records = trajectory_records(batch, TokenTexts(SplitTokenizer()), 1, "val", 2)
    assert [record["score"] for record in records] == [None, 1.0]


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("Answer. Question: a?\nQuestion: Who?\n", "Who?"),
        ("Say it.\nWhere is it?\n\n", "Where is it?"),
        ("", ""),
    ],
)
def test_the_question_is_found_in_the_prompt(prompt, question):
    assert find_question(prompt) == question


def test_the_folder_gives_a_spread_of_all_steps(tmp_path):
    folder = TrajectoryFolder(tmp_path / "t")
    for step in range(20):
        folder.add(step, records_of(["Ada", "Bob"], step=step))
    folder.add(19, records_of(["Ada"], split="val", step=19))
    assert folder.steps() == list(range(20))
    assert len(folder.read(1000)) == 41
    some = folder.read(10)
    assert len(some) == 10 and some[0]["step"] == 0 and some[-1]["split"] == "val"
    assert [r["step"] for r in some] == sorted(r["step"] for r in some)
    folder.cut_after(4)
    assert folder.steps() == [0, 1, 2, 3, 4]


def page_of(records: list[dict], tmp_path, title: str = "cheese") -> tuple[str, dict]:
    write_page(records, tmp_path / "page.html", title)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return text, json.loads(match.group(1))


def test_no_text_can_end_the_data_of_the_page(tmp_path):
    records = records_of(["</script><script>alert(1)</script>", "<!--", "\u2028 & ä"])
    text, data = page_of(records, tmp_path, title="</script>")
    assert [record["answer"] for record in data["records"]] == [record["answer"] for record in records]
    assert text.count("</script>") == 2 and "<!--" not in text and "alert(1)</script>" not in text


def test_the_page_is_self_contained(tmp_path):
    text, data = page_of(records_of(["Ada", "Bob"]), tmp_path)
    assert len(data["records"]) == 2
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", text)
    assert "innerHTML" not in text and "eval(" not in text


def test_results_of_several_models_are_on_the_page(tmp_path):
    told = [record | {"model": "</script>"} for record in records_of(["Ada"])]
    results = {"tables": [{"title": "EM", "columns": ["", "EM"], "rows": [["before", "0.1"]]}], "image": None}
    write_page(told, tmp_path / "page.html", "cheese", results)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and '"rows": [["before", "0.1"]]' in text


def test_records_with_letters_that_end_lines_are_all_on_the_page(tmp_path):
    folder = TrajectoryFolder(tmp_path)
    records = records_of(["Ada", "Bob\u2028\u2029\x85Cy"])
    folder.add(1, records)
    assert [record["answer"] for record in folder.read(10)] == ["Ada", "Bob\u2028\u2029\x85Cy"]


NODE = shutil.which("node")
# A document that keeps what the page's script puts into it; `text` of a node is all that a reader sees.
DOM = """
const nodes = {};
class Node {
  constructor(name) { this.name = name; this.children = []; this.own = ""; this.dataset = {}; this.value = "";
    this.classList = { toggle() {} }; }
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own + this.children.map((c) => c.textContent).join(" "); }
  get firstElementChild() { return this.children[0] || this.appendChild(new Node("div")); }
  get lastChild() { return this.children[this.children.length - 1]; }
  appendChild(child) { child.parent = this; this.children.push(child); return child; }
  replaceChildren(...children) { this.children = []; children.forEach((c) => this.appendChild(c)); }
  before(...children) { this.parent.children.push(...children); }
  addEventListener() {} setAttribute() {} scrollIntoView() {}
}
global.Option = class extends Node { constructor(text) { super("option"); this.own = text; } };
global.IntersectionObserver = class { observe() {} unobserve() {} };
global.document = { createElement: (name) => new Node(name), addEventListener() {},
  querySelectorAll: () => [], querySelector: () => null,
  createTextNode: (text) => Object.assign(new Node("text"), { own: text }),
  getElementById: (id) => (nodes[id] ??= new Node(id)) };
const page = require("fs").readFileSync(process.argv[2], "utf8");
const [, data, script] = page.match(/id="data">(.*?)<\\/script>\\s*<script>(.*)<\\/script>/s);
document.getElementById("data").textContent = data;
(0, eval)(script);
console.log(nodes.detail.textContent);
"""


def read_page(file, tmp_path) -> str:
    """Return what a reader of a page sees of the trajectory at which it opens."""
    (tmp_path / "dom.js").write_text(DOM)
    command = [NODE, str(tmp_path / "dom.js"), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(NODE is None, reason="the page's script is run by node")
def test_the_page_shows_what_an_environment_replied(tmp_path):
    record = records_of(["Ada"])[0] | {"answer": None, "em": 0, "gold": ["None"]}
    first, last = record["trajectory"]["turns"]
    record["trajectory"] |= {"env_class": "text2sql", "num_searches": 0}
    record["trajectory"]["turns"] = [first | {"action": "sql", "documents": None}, last]
    write_page([record], tmp_path / "page.html", "sql")
    shown = read_page(tmp_path / "page.html", tmp_path)
    turns = shown.partition("Turns")[2].partition("Tokens")[0]
    assert "reads" in turns and "Doc 1(Title: Käse)" in turns
    assert "2 turns" in shown and "text2sql" in shown
    assert "golden answer" not in shown and "0 searches" not in shown


@pytest.mark.skipif(NODE is None, reason="the page's script is run by node")
def test_the_documents_of_a_search_are_told_once(tmp_path):
    write_page(records_of(["Ada"]), tmp_path / "page.html", "cheese")
    turns = read_page(tmp_path / "page.html", tmp_path).partition("Turns")[2].partition("Tokens")[0]
    assert turns.count("Käse") == 2 and "reads" not in turns  # the query, and the title of the document
