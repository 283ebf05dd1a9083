from __future__ import annotations

import asyncio
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest
from packaging.version import Version

from verl.config.environments import EnvironmentConfig
from verl.environments import make
from verl.environments.adapters import load_verifiers_environment, verifiers_rows
from verl.environments.executors import Environments

# Asked without an import, which takes seconds in each process of the tests.
INSTALLED = [Version(installed.version) for installed in metadata.distributions(name="verifiers")]
IS_USABLE = bool(INSTALLED) and INSTALLED[0] < Version("0.4")
pytestmark = pytest.mark.skipif(not IS_USABLE, reason="needs verifiers below 0.4")

LOOP = asyncio.Runner()
MODULE = '''
import verifiers as vf
from datasets import Dataset

def exact(completion, answer):
    return float(completion[-1]["content"].strip() == answer)

def length(completion):
    return len(completion)

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        number = int(messages[-1]["content"])
        if number == int(state["answer"]):
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if number < int(state["answer"]) else "lower"}]

def solved(state, answer):
    return float(any(step["completion"][-1]["content"] == answer for step in state["trajectory"]))

def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b

def load_environment(kind="single", questions=3):
    data = Dataset.from_list([{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(questions)])
    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.0])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, system_prompt="Be short.", rubric=rubric)
    if kind == "guess":
        return Guess(dataset=data, max_turns=3, rubric=vf.Rubric(funcs=[solved]))
    if kind == "group":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[lambda completions: [0.0]]))
    return vf.ToolEnv(dataset=data, tools=[add], rubric=rubric, max_turns=4)
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "my_environment.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def episode(index=2, **args):
    row = verifiers_rows("my-environment", args)[index]
    env = make("verifiers", extras={name: value for name, value in row.items() if name != "prompt"})
    return env, LOOP.run(env.init(row["prompt"]))[0]


def step(env, text):
    return LOOP.run(env.step(text))


def test_a_single_turn_is_scored_by_its_rubric():
    before = signal.getsignal(signal.SIGTERM)
    rows = verifiers_rows("my-environment", {"questions": 5})
    assert len(rows) == 5 and json.loads(rows[3]["verifiers"])["row"]["answer"] == "6"
    for text, reward in (("4", 1.0), ("5", 0.0)):
        env, messages = episode()
        assert messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
        assert step(env, text) == {"observations": [], "reward": reward, "done": True, "metadata": {}}
        assert env.get_metrics()["exact"] == reward and env.get_metrics()["length"] == 1
        LOOP.run(env.close())
    assert signal.getsignal(signal.SIGTERM) == before


def test_several_turns_with_the_environments_own_answers():
    env, messages = episode(kind="guess")
    outputs = [step(env, text) for text in ("1", "7", "4")]
    texts = [[each["content"] for each in output["observations"]] for output in outputs]
    assert texts == [["higher"], ["lower"], []]
    assert [output["reward"] for output in outputs] == [0.0, 0.0, 1.0] and outputs[-1]["done"]
    env, messages = episode(kind="guess")
    assert [step(env, "1")["done"] for _ in range(3)] == [False, False, True]


def test_tools_are_called_in_the_turns_text():
    env, messages = episode(kind="tool")
    assert messages[0]["role"] == "system" and '"add"' in messages[0]["content"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    assert step(env, f"I add. {call}")["observations"] == [
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}
    ]
    assert "Expecting value" in step(env, "<tool_call>add 2 and 2</tool_call>")["observations"][0]["content"]
    output = step(env, "4")
    assert output["done"] and output["reward"] == 1.0 and env.get_metrics()["add_calls"] == 1


def test_episodes_of_several_threads_do_not_mix_and_load_the_environment_once():
    before = signal.signal
    with ThreadPoolExecutor(16) as pool:
        asked = [("my-environment", {"questions": 7})] * 16
        loaded = list(pool.map(lambda each: load_verifiers_environment(*each), asked))
    assert len(set(map(id, loaded))) == 1 and signal.signal is before
    episodes = [episode(index, kind="guess")[0] for index in (0, 1, 2)]
    assert [step(env, "2")["observations"][0]["content"] for env in episodes[::2]] == ["lower", "higher"]
    assert [step(env, text)["reward"] for env, text in zip(episodes, "024", strict=True)] == [1.0, 1.0, 1.0]


def test_an_environment_that_fails_raises_and_an_unfinished_one_closes():
    env, _ = episode(kind="guess")
    with pytest.raises(Exception, match=r"invalid literal|failed"):
        step(env, "no number")
    env, _ = episode(kind="guess")
    LOOP.run(env.close())
    with pytest.raises(ValueError, match="score"):
        verifiers_rows("my-environment", {"kind": "group"})
    with pytest.raises(Exception, match="nowhere"):
        verifiers_rows("nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["auto", "process"])
def test_the_event_loop_and_a_process_run_it(executor):
    environments = Environments(EnvironmentConfig(executor=executor))
    runner = environments["verifiers"]
    row = verifiers_rows("my-environment", {"kind": "guess"})[2]
    episode = runner.open(row, row["prompt"], 3).result(60)
    assert episode.messages == [{"role": "user", "content": "2+2?"}]
    texts = [runner.step_many([episode], [text])[0].result(20)["observations"] for text in ("1", "4")]
    assert texts == [[{"role": "user", "content": "higher"}], []]
    runner.close(episode)
    environments.wait_until_closed()
    assert episode.metrics["solved"] == 1.0
    environments.close()
