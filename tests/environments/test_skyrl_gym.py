"""Our environments beside skyrl-gym's, on generated episodes: rewards, ends, numbers of turns and of
observations are equal, but for mistakes of theirs, which have a test each. What observations say is not
compared: their sentences are theirs.
"""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from collections import Counter
from types import SimpleNamespace

import pytest

import search_r1.llm_agent.generation  # noqa: F401  # registers "search"
from search_r1.search.client import SearchClient
from verl.environments import make
from verl.utils.errors import CouldNotVerify
from verl.utils.reward_score.qa_em import compute_score_em, join_turns

skyrl_gym = pytest.importorskip("skyrl_gym")

NUM_EPISODES = 1_000


def both(env_class, config, row):
    """Their environment of a row, and ours. Theirs reads its configuration as attributes."""
    return skyrl_gym.make(env_class, env_config=SimpleNamespace(**config), extras=row), make(
        env_class, env_config=config, extras=row
    )


def play(env, actions):
    """(reward, done, number of observations) of each turn, up to the end of the episode."""
    turns = []
    for action in actions:
        output = env.step(action)
        turns.append((output["reward"], output["done"], len(output["observations"])))
        if output["done"]:
            break
    return turns


def truth(gold, **more):
    spec = {"method": "rule", "ground_truth": gold}
    return {"reward_spec": spec, "reward_model": spec, "extra_info": {}, **more}


def one_of(rng, texts):
    return rng.choice(texts.split("|"))


def number_text(rng, gold):
    """A turn that gives the gold answer, another number, or none, in one of many forms."""
    number = rng.choice([gold, gold, str(rng.randint(-50, 2_000)), f"{rng.randint(1_000, 9_999):,}", "", "."])
    form = one_of(rng, "#### {}|####{}|so #### {}.|#### ${}|#### {} dollars|it is {}|## {}")
    return f"{rng.choice(['', 'Let me see. ', '#### '])}{form.format(number)}{rng.choice(['', ' #### 7'])}"


@pytest.mark.parametrize("env_class", ["gsm8k", "gsm8k_multi_turn"])
def test_gsm8k_as_theirs(env_class):
    rng = random.Random(env_class)
    rewards = Counter()
    for _ in range(NUM_EPISODES):
        gold = str(rng.randint(-20, 1_500))
        max_turns = rng.randint(1, 6)
        more = rng.choice([{"max_turns": max_turns}, {"extra_info": {"max_turns": max_turns}}])
        theirs, ours = both(env_class, {}, truth(gold, **more))
        actions = [number_text(rng, gold) for _ in range(max_turns)]
        assert (expected := play(theirs, actions)) == play(ours, actions), (gold, actions)
        assert theirs.get_metrics() == ours.get_metrics()
        rewards.update(round(reward, 3) for reward, _, _ in expected)
    assert len(rewards) >= (2 if env_class == "gsm8k" else 6) and min(rewards.values()) > 20


ANSWERS = [
    "204", "1,024", r"\frac{1}{2}", r"\frac12", r"\sqrt2", "12 square units", r"90^\circ", r"$\text{the } 5$",
    r"x = 7", r"\textbf{3} meters", r"\overline{AB}", "(1, 2)", r"3\%", "a b", r"\boxed{8}", "0042", "-3", "",
]  # fmt: skip


@pytest.mark.slow
def test_aime_as_theirs():
    rng = random.Random("aime")
    rewards = Counter()
    mended = Counter()
    for _ in range(NUM_EPISODES):
        gold = rng.choice([answer for answer in ANSWERS if answer])  # a row without an answer is refused
        given = rng.choice([gold, rng.choice(ANSWERS)])
        forms = "Answer: {}|answer : {}|so Answer:{} <end>|It is {}|Answer: 1\nAnswer: {}"
        form = one_of(rng, forms)
        text = "Thinking. " * rng.choice([0, 3, 60]) + form.format(given)
        text += rng.choice(["", "", ".", "\nDone.", "\n" + "." * 300])
        if r"\boxed" in text and "nswer" not in text[-300:]:
            continue  # a test of its own, below
        theirs, ours = both("aime", {}, truth(gold))
        expected = play(theirs, [text])
        result = play(ours, [text])
        if expected != result:  # math-verify: right, say with a full stop behind it, or with %
            assert expected[0][0] == -1 and result[0][0] == 1, (gold, text)
            assert given == gold or {given, gold} == {r"3\%", r"\textbf{3} meters"}, (gold, text)
            mended[gold] += 1
        rewards.update(reward for reward, _, _ in expected)
    assert min(rewards[1.0], rewards[-1.0]) > 100 and 0 < mended.total() < 100


def test_their_aime_refuses_an_answer_in_a_box():
    theirs, ours = both("aime", {}, truth("204"))
    text = r"Thus \boxed{204}."
    assert play(theirs, [text]) == [(-1.0, True, 0)] and play(ours, [text]) == [(1.0, True, 0)]


TABLE = [(f"name{i % 60}", i % 5, i % 7 / 2, None if i % 11 == 0 else i) for i in range(90)]
COLUMNS = ["name", "shop", "price", "stock"]


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("databases")
    file = folder / "spider" / "database" / "shop" / "shop.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE item (name TEXT, shop INTEGER, price REAL, stock INTEGER)")
        connection.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", TABLE)
    yield SimpleNamespace(config={"db_path": str(folder)}, read=connection.execute)
    connection.close()


def some_query(rng):
    columns = ", ".join(rng.sample(COLUMNS, rng.randint(1, 2)))
    distinct = rng.choice(["", "", "DISTINCT "])
    where = rng.choice(["", f" WHERE shop = {rng.randint(0, 5)}", f" WHERE price > {rng.randint(0, 4)}"])
    order = rng.choice(["", "", f" ORDER BY {rng.choice(COLUMNS)}{rng.choice(['', ' DESC'])}, rowid"])
    return f"SELECT {distinct}{columns} FROM item{where}{order}{rng.choice(['', '', ' LIMIT 5'])}"


def sql_turn(rng, gold, is_last):
    broken = rng.choice(["SELECT nothing FROM item", "SELEC", "SELECT 1 FROM nowhere", ""])
    query = rng.choice([gold, gold, gold.lower() + " ", some_query(rng), broken])
    so = "<think>so</think>"
    think = rng.choice([so] * 8 + ["", "<think>so", "so <think>x</think>", " <THINK>so</think>"])
    if is_last or rng.random() < 0.25:
        broken = (
            "<solution>{}|<solution><sql>{}</sql></solution>|{}|<solution>{}</solution> <sql>x</sql>|"
            "<solution>a</solution><solution>{}</solution>|</observation><think>z</think><solution>{}</solution>"
        )
        form = rng.choice(["<solution>{}</solution>"] * 8 + broken.split("|"))
    else:
        form = rng.choice(["<sql>{}</sql>"] * 5 + ["<sql>{}", "{}", "<sql>{}</sql><sql>x</sql>"])
    return think + form.format(query)


@pytest.mark.slow
def test_text2sql_as_theirs(databases):
    rng = random.Random("sql")
    rewards = Counter()
    mended = 0
    for _ in range(NUM_EPISODES):
        gold = some_query(rng)
        max_turns = rng.randint(1, 4)
        row = truth(gold, db_id="shop", data="spider", max_turns=max_turns)
        theirs, ours = both("text2sql", databases.config, row)
        actions = [sql_turn(rng, gold, turn == max_turns - 1) for turn in range(max_turns)]
        expected = play(theirs, actions)
        result = play(ours, actions)
        rewards.update(reward for reward, done, _ in expected if done)
        if expected != result:  # equal as a set, but not as often, not in order, or other columns
            assert (expected[:-1], expected[-1][0], result[-1][0]) == (result[:-1], 1, 0), (gold, actions)
            solution = actions[len(expected) - 1].split("<solution>")[1].split("</solution>")[0]
            found = databases.read(solution)
            right = databases.read(gold)
            columns = [cursor.description and len(cursor.description) for cursor in (found, right)]
            rows = found.fetchall()
            right_rows = right.fetchall()
            assert set(rows) == set(right_rows) and (rows != right_rows or columns[0] != columns[1])
            assert Counter(rows) != Counter(right_rows) or "ORDER BY" in gold or rows == []
            mended += 1
    assert min(rewards[1.0], rewards[0.0], rewards[-1.0]) > 100 and 0 < mended < 100


@pytest.mark.parametrize(
    "gold, solution",
    [
        ("SELECT name FROM item ORDER BY stock DESC", "SELECT name FROM item ORDER BY stock"),  # wrong order
        ("SELECT shop FROM item", "SELECT DISTINCT shop FROM item"),  # rows too seldom
        ("SELECT DISTINCT shop FROM item", "SELECT shop FROM item"),  # rows too often
        ("SELECT name, shop FROM item WHERE shop > 9", ""),  # no query at all
    ],
)
def test_their_text2sql_pays_for_other_rows(databases, gold, solution):
    theirs, ours = both("text2sql", databases.config, truth(gold, db_id="shop", data="spider"))
    text = f"<think>x</think><solution>{solution}</solution>"
    assert play(theirs, [text]) == [(1.0, True, 0)] and play(ours, [text]) == [(0.0, True, 0)]


def test_their_text2sql_writes_files(databases, tmp_path):
    theirs, ours = both("text2sql", databases.config, truth("SELECT 1", db_id="shop", data="spider"))
    for env, written in ((ours, False), (theirs, True)):
        env.step(f"<think>x</think><sql>ATTACH DATABASE '{tmp_path}/evil.db' AS evil</sql>")
        assert (tmp_path / "evil.db").exists() == written


def test_their_text2sql_shows_neither_names_nor_order(databases):
    row = truth("SELECT 1", db_id="shop", data="spider")
    query = "<think>x</think><sql>SELECT name AS item_name FROM item ORDER BY name, stock LIMIT 40</sql>"
    names = [name for (name,) in databases.read("SELECT name FROM item ORDER BY name, stock LIMIT 40")]
    texts = [env.step(query)["observations"][0]["content"] for env in both("text2sql", databases.config, row)]
    assert ["item_name" in text for text in texts] == [False, True]
    lines = [[line.strip() for line in text.splitlines() if line.strip() in names] for text in texts]
    assert lines[1] == names and lines[0] != names


def test_their_text2sql_reads_tags_in_the_result(databases):
    gold = "SELECT name FROM item"
    theirs, ours = both("text2sql", databases.config, truth(gold, db_id="shop", data="spider"))
    think = "<think>x</think>"
    actions = [f"{think}<sql>SELECT '<solu' || 'tion>'</sql>", f"{think}<solution>{gold}</solution>"]
    assert play(theirs, actions)[-1][0] == -1 and play(ours, actions)[-1][0] == 1


PROGRAMS = [
    "n = int(input())\nprint(n * n)",
    "import sys\nprint(int(sys.stdin.readline()) ** 2, '\\n')",
    "n = int(input())\nprint(n * n if n < {n} else 0)",
    "n = int(input())\nprint(float(n * n))",
    "print({n})",
    "n = input(\nprint(n)",
    "n = int(input())\nprint(n // 0)",
    "def f(n):\n    return n * n",
    "class Solution:\n    def f(self, n: int) -> List[int]:\n        return n * n",
    "def f(n):\n    return n * n if n < {n} else None",
    "def f(n):\n    raise ValueError(n)",
    "def g(n):\n    return n * n",
]


@pytest.mark.slow
def test_lcb_as_theirs():
    """Fewer: theirs starts two processes for each program."""
    rng = random.Random("lcb")
    rewards = Counter()
    for _ in range(60):
        functional = rng.random() < 0.5
        numbers = rng.sample(range(-9, 30), 3)
        kind, end = ("functional", "") if functional else ("stdin", "\n")
        tests = [
            {"testtype": kind, "input": f"{n}{end}", "output": f"{n * n}", "metadata": {"func_name": "f"}}
            for n in numbers
        ]
        theirs, ours = both("lcb", {}, truth(json.dumps(tests)))
        program = rng.choice(PROGRAMS).replace("{n}", str(rng.choice(numbers)))
        form = rng.choice(["```python\n{}\n```", "```\n{}\n```\n", "{}"])
        text = rng.choice(["", "```\nprint(1)\n```\n"]) + form.replace("{}", program)
        assert (expected := play(theirs, [text])) == play(ours, [text]), (tests, text)
        rewards.update(reward for reward, _, _ in expected)
    assert min(rewards[1.0], rewards[0.0]) > 10


@pytest.mark.slow
def test_their_lcb_pays_for_cheats():
    equal = "class E(list):\n    __eq__ = lambda self, other: True\ndef f(n):\n    return E()"
    frame = (
        "import sys\ndef f(n):\n    frame = sys._getframe()\n    while 'gt_out' not in frame.f_locals:\n"
        "        frame = frame.f_back\n    return frame.f_locals['gt_out']"
    )
    tests = [{"testtype": "functional", "input": "3", "output": "9", "metadata": {"func_name": "f"}}]
    for program in (equal, frame):
        theirs, ours = both("lcb", {}, truth(json.dumps(tests)))
        text = f"```python\n{program}\n```"
        assert play(theirs, [text]) == [(1.0, True, 0)]  # `tmp_result is True` holds for both
        try:
            assert play(ours, [text]) == [(0.0, True, 0)]
        except CouldNotVerify:  # what equals everything is no verdict
            assert program == equal


def tool_turn(rng, num_programs):
    calls = (
        "<tool><search>who {n}</search></tool>|<tool><python>print({n})</python></tool>|<tool>{n}</tool>|"
        "<tool><shell>{n}</shell></tool>|I think {n}|<tool><search>who {n}</search>|#### {n}|"
        "<solution>#### {n}</solution>|<solution>{n}</solution>|<solution>#### {n}|so #### {n}, I say"
    )
    call = one_of(rng, calls)
    if "<python>" in call:  # theirs starts a process
        num_programs[0] += 1
        call = call if num_programs[0] <= 25 else "<tool><search>{n}</search></tool>"
    return call.replace("{n}", str(rng.choice([42, 42, 7])))


@pytest.mark.slow
def test_searchcode_as_theirs(url):
    rng = random.Random("searchcode")
    rewards = Counter()
    num_programs = [0]
    for _ in range(NUM_EPISODES):
        max_turns = rng.randint(1, 4)
        theirs, ours = both("searchcode", {"search_url": url}, truth("42", max_turns=max_turns))
        theirs.tool_groups[0].search_url = url
        actions = [tool_turn(rng, num_programs) for _ in range(max_turns)]
        assert (expected := play(theirs, actions)) == play(ours, actions), actions
        rewards.update(reward for reward, done, _ in expected if done)
    assert min(rewards[1.0], rewards[0.0]) > 100


@pytest.mark.slow
def test_their_searchcode_pays_for_what_a_program_printed(url, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "treasure")
    theirs, ours = both("searchcode", {"search_url": url}, truth("42", max_turns=2))
    program = "import os\nprint('####', 42, os.environ.get('SECRET_OF_THE_TRAINER'))"
    look = f"<tool><python>{program}</python></tool>"
    seen = [env.step(look)["observations"][0]["content"] for env in (theirs, ours)]
    assert seen == ["#### 42 treasure", "#### 42 None"]
    assert [env.step("done")["reward"] for env in (theirs, ours)] == [1.0, 0.0]


def search_turn(rng):
    answers = ["<think>so</think><answer>Jane Austen</answer>", "<answer>the  jane austen!</answer>"]
    others = "<answer>Emma</answer>|<answer>Jane Austen|search who</search>|I think.|<search></search>"
    return rng.choice(["<search>who wrote Emma</search>"] * 3 + answers * 2 + others.split("|"))


def search_episode(url, client, actions, gold, max_turns):
    """Of theirs and of ours, whose reward is the run's exact match over the policy's text. Ours has one turn
    more than its `max_turns`, as Search-R1's.
    """
    config = SimpleNamespace(search_url=url, topk=1, timeout=5, log_requests=False)
    row = truth({"target": [gold]}, max_turns=max_turns)
    theirs = play(skyrl_gym.make("search", env_config=config, extras=row), actions)
    config = {"client": client, "topk": 1, "do_search": True, "max_turns": max_turns - 1}
    ours = play(make("search", env_config=config, extras={**row, "max_turns": max_turns - 1}), actions)
    reward = compute_score_em(join_turns(actions[: len(ours)]), {"target": [gold]})
    return theirs, [*((0, done, number) for _, done, number in ours[:-1]), (reward, *ours[-1][1:])]


@pytest.mark.slow
def test_search_as_theirs(url):
    rng = random.Random("search")
    rewards = Counter()
    with contextlib.closing(SearchClient(url, topk=1)) as client:
        for _ in range(NUM_EPISODES):
            max_turns = rng.randint(1, 4)
            actions = [search_turn(rng) for _ in range(max_turns)]
            theirs, ours = search_episode(url, client, actions, "Jane Austen", max_turns)
            if theirs != ours:  # an answer that its turn did not close spoils theirs of a later turn
                assert theirs[:-1] == ours[:-1] and ours[-1][0] == 1, actions
                assert "<answer>Jane Austen" in actions and "austen" in actions[len(ours) - 1].lower()
            rewards.update(reward for reward, done, _ in theirs if done)
    assert min(rewards[1.0], rewards[0.0]) > 100


def test_their_search_pays_for_an_answer_in_a_document(url):
    with contextlib.closing(SearchClient(url, topk=1)) as client:
        actions = ["<search>trap</search>", "I give up."]
        theirs, ours = search_episode(url, client, actions, "Jane Austen", 2)
    assert theirs[-1] == (1.0, True, 0) and ours[-1] == (0.0, True, 0)
