from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.environments import make
from verl.environments.text2sql import is_ordered, query, read_solution
from verl.utils.errors import CouldNotVerify

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
# One operation that takes an hour, in which SQLite does not look whether it should stop.
STUBBORN = "SELECT instr(hex(zeroblob(8000000)), hex(zeroblob(1000000)) || '1')"
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)"
PRINTF = "sum(length(printf('%.*c', 1000000000 + i, 'x')))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("databases")
    (path / "shop").mkdir()
    with sqlite3.connect(path / "shop" / "shop.sqlite") as connection:
        connection.execute("CREATE TABLE item (name TEXT, price REAL, stock INTEGER)")
        rows = [(f"item {index:03}", index / 4, index % 7) for index in range(200)]
        connection.executemany("INSERT INTO item VALUES (?, ?, ?)", rows)
    connection.close()
    return path


@pytest.fixture
def world(folder):
    def start(gold="SELECT name FROM item WHERE stock = 3 AND price < 5", seconds=5, **more):
        extras = {"db_id": "shop", "reward_spec": {"ground_truth": gold}, "max_turns": 4, **more}
        return make("text2sql", env_config={"db_path": str(folder), "seconds": seconds}, extras=extras)

    return start


def solve(env, sql):
    output = env.step(f"<think>x</think><solution>{sql}</solution>")
    assert output["done"] and output["observations"] == []
    return output["reward"]


def look(env, sql):
    output = env.step(f"<think>x</think><sql>{sql}</sql>")
    assert not output["done"] and output["reward"] == 0
    return output["observations"][0]["content"]


def test_right_wrong_and_malformed(world):
    assert solve(world(), "SELECT name FROM item WHERE price < 5 AND stock = 3") == 1
    assert solve(world(), "SELECT name FROM item WHERE price < 5") == 0
    assert solve(world(), "SELECT nothing FROM nowhere") == 0
    assert world().step("<solution>SELECT 1</solution>")["reward"] == -1  # no thought
    env = world(max_turns=1)
    assert env.step("<think>x</think><sql>SELECT 1</sql>") == {
        "observations": [], "reward": -1.0, "done": True, "metadata": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    "actions, solution",
    [
        (["<think>a</think><sql>q</sql>", "<think>b</think><solution> s </solution>"], "s"),
        (["<think>a</think><sql>q</sql>", "<solution>s</solution>"], None),
        (["<think>a</think><solution>s<sql>q</sql></solution>"], None),
        (["<think>a</think><solution>s</solution><solution>t</solution>"], None),
        (["<think>a</think><solution>s"], None),
        (["<think>a</think></observation>x<solution>s</solution>"], None),
        (["<think>a<solution>s</solution>"], None),
    ],
)
def test_the_form(actions, solution):
    assert read_solution(actions) == solution


def test_what_the_database_holds_is_no_part_of_the_answer(world):
    env = world()
    assert "<solution>a</solution>" in look(env, "SELECT '<solu' || 'tion>a</solu' || 'tion>' AS trap")
    assert solve(env, "SELECT name FROM item WHERE price < 5 AND stock = 3") == 1


def test_no_result_is_not_an_empty_result(world):
    gold = "SELECT name, price FROM item WHERE price < 0"
    assert solve(world(gold), "SELECT name, price FROM item WHERE stock > 100") == 1
    assert solve(world(gold), "") == solve(world(gold), "SELECT 1 WHERE 0") == 0


@pytest.mark.parametrize(
    "sql, ordered",
    [
        ("SELECT a FROM t ORDER BY a LIMIT 3", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT a, row_number() OVER (ORDER BY b) FROM t", False),
        ("WITH w AS (SELECT 1) SELECT * FROM w UNION SELECT 2 ORDER BY 1", True),
    ],
)
def test_order_by_counts_at_the_outermost_level(sql, ordered):
    assert is_ordered(sql) == ordered


def test_the_policy_sees_names_order_and_at_most_fifty_rows(world):
    text = look(world(), "SELECT name, price AS cost FROM item WHERE price < 1")
    lines = text.strip().splitlines()
    assert lines[0] == "<observation>name | cost" and lines[1] == "item 000 | 0.0"
    assert lines[-1] == "<reminder>Turns left: 3.</reminder></observation>" and len(lines) == 6
    assert "\na  b c | 1\n" in look(world(), "SELECT 'a  b' || char(10) || 'c', 1")
    assert "item 049" in (text := look(world(), "SELECT name FROM item")) and "item 050" not in text
    assert "there are more" in text and "no rows" in look(world(), "SELECT 1 WHERE 0")
    assert 9_000 < len(look(world(), "SELECT hex(zeroblob(100000))")) < 9_200
    assert "no query" in world().step("hello")["observations"][0]["content"]


EVIL = """ATTACH DATABASE '{file}' AS evil
VACUUM INTO '{file}'
PRAGMA query_only = OFF
SELECT * FROM pragma_database_list
CREATE TABLE evil (a)
CREATE TEMP TABLE evil AS SELECT 1
DELETE FROM item
BEGIN
SELECT load_extension('{file}')
SELECT writefile('{file}', 'x')
SELECT 1; ATTACH DATABASE '{file}' AS evil"""


@pytest.mark.parametrize("sql", EVIL.splitlines())
def test_queries_only_read(world, folder, tmp_path, sql):
    before = (folder / "shop" / "shop.sqlite").read_bytes()
    sql = sql.format(file=tmp_path / "evil.db")
    assert "Error: " in look(world(), sql) and solve(world(), sql) == 0
    assert list(tmp_path.iterdir()) == [] and os.listdir(folder / "shop") == ["shop.sqlite"]
    assert (folder / "shop" / "shop.sqlite").read_bytes() == before


def test_an_error_of_a_query_is_shown_without_places_in_this_project(world):
    assert "<observation>Error: OperationalError: no such column: b\n" in look(world(), "SELECT b FROM item")


def test_a_query_without_end_is_stopped_and_its_process_goes_on(world):
    env = world(seconds=0.2)
    look(env, "SELECT 1")
    (process,) = env.workers._idle
    assert "stopped after 0.2 s" in look(env, ENDLESS) and solve(env, ENDLESS) == 0
    assert env.workers._idle == [process] and process.is_alive


@pytest.mark.slow
def test_an_operation_that_does_not_listen_ends_with_its_process(world):
    assert "stopped after 0.1 s of computing" in look(world(seconds=0.1), STUBBORN)
    assert solve(world(seconds=0.1), STUBBORN) == 0
    with pytest.raises(CouldNotVerify, match=r"the right query .*stopped after 0.1 s of computing"):
        solve(world(STUBBORN, seconds=0.1), "SELECT 1")


def test_memory_is_limited(world):
    huge = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100) "
    for sql in ("SELECT randomblob(1000000000)", huge + "SELECT randomblob(30000000) FROM n ORDER BY 1"):
        assert "Error: " in look(world(), sql)
    assert "1.0" in look(world(), "SELECT 1.0")


def test_a_right_query_that_fails_gives_no_verdict_and_a_killed_process_is_replaced(world):
    with pytest.raises(CouldNotVerify, match="no such column: nam"):
        solve(world("SELECT nam FROM item"), "SELECT name FROM item")
    for process in world().workers._idle:
        os.kill(process.pid, signal.SIGKILL)
    assert solve(world("SELECT 1"), "SELECT 1") == 1


def test_many_episodes_at_once(world):
    def episode(index):
        env = world(f"SELECT name FROM item WHERE stock = {index % 7}")
        assert "item" in look(env, f"SELECT name FROM item WHERE stock = {index % 7}")
        return solve(env, f"SELECT name FROM item WHERE stock = {index % 5}")

    with ThreadPoolExecutor(32) as pool:
        rewards = list(pool.map(episode, range(256)))
    assert rewards == [float(index % 7 == index % 5) for index in range(256)]
    assert len(world().workers._idle) <= (os.cpu_count() or 1)


def test_mistakes_of_the_user_are_told(world, folder):
    with pytest.raises(FileNotFoundError, match=r"nowhere.sqlite"):
        world(db_id="nowhere")
    with pytest.raises(ValueError, match="data='birds'.*spider, bird"):
        world(data="birds")
    with pytest.raises(ValueError, match="env_config.text2sql.db_path"):
        make("text2sql", extras={"db_id": "shop", "reward_spec": {"ground_truth": "SELECT 1"}})


@pytest.mark.parametrize("sql", [STUBBORN, f"SELECT {PRINTF} FROM n"], ids=["instr", "printf"])
def test_one_operation_that_does_not_listen_is_ended_at_its_own_limit(sql):
    """The process may compute for a minute, and this query for a fifth of a second."""
    pid = os.fork()
    if pid == 0:  # as a process of `KillableWorkers`
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, 60)
        with contextlib.suppress(Exception):
            query(":memory:", f"{NUMBERS} {sql}", 0.2, 1)
        os._exit(0)
    _, _, usage = os.wait4(pid, 0)
    assert usage.ru_utime + usage.ru_stime < 2.0
