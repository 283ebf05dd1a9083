from __future__ import annotations

import json

import pytest

from verl.environments import make
from verl.utils.errors import CouldNotVerify


def start(url="http://127.0.0.1:9/retrieve", max_turns=4, **config):
    extras = {"reward_spec": {"ground_truth": "42"}, "max_turns": max_turns}
    return make("searchcode", env_config={"search_url": url, **config}, extras=extras)


def observed(env, action):
    output = env.step(action)
    assert not output["done"] and output["reward"] == 0
    return "".join(message["content"] for message in output["observations"])


def test_a_search_brings_documents(url):
    env = start(url, topk=2)
    expected = {"result": 'Doc 1: "Title 0"\nabout the answer\nDoc 2: "Title 1"\nabout the answer\n'}
    assert json.loads(observed(env, "<tool><search> the answer </search></tool>")) == expected
    assert env.tool_groups[0].get_tool("search") and env.tool_groups[0].get_tool("shell") is None
    assert env.tool_groups[0].get_tool_to_group_mapping() == {"search": "SearchToolGroup"}
    assert "No search results" in observed(env, "<tool><search>nothing</search></tool>")
    assert env.step("<solution>#### 42</solution>")["reward"] == 1


def test_wrong_calls_are_told(url):
    env = start(url)
    assert "no tool call" in observed(env, "hello")
    assert "no tool 'shell'" in observed(env, "<tool><shell>ls</shell></tool>")
    assert "no tool call" in observed(env, "<tool>search</tool>")
    assert env.step("#### 42")["done"]


def test_a_search_is_tried_again_and_fails_for_good(url, retriever):
    retriever.failures = 1
    assert "Doc 1" in observed(start(url), "<tool><search>x</search></tool>")
    retriever.failures = 1_000
    with pytest.raises(CouldNotVerify, match="503"):
        start(url, timeout=0.5).step("<tool><search>x</search></tool>")
    retriever.failures = 0
    with pytest.raises(CouldNotVerify, match="did not answer"):
        start(timeout=0.5).step("<tool><search>x</search></tool>")


def test_only_the_policys_own_text_outside_of_calls_is_an_answer():
    for last, reward in (("<solution>#### 42</solution>", 1), ("<solution>#### 41</solution>", 0), ("", 0)):
        env = start(max_turns=2)
        env.actions.append("<tool><python>#### 7\nprint('#### 42')</python></tool>")
        assert env.step(last + "</solution><solution>")["reward"] == reward


@pytest.mark.slow
def test_what_a_program_prints_earns_nothing(url):
    env = start(url, max_turns=3)
    assert observed(env, "<tool><python>print('####', 6 * 7)</python></tool>") == "#### 42"
    assert observed(env, "<tool><python>x = 1</python></tool>") == ""
    assert 9_000 < len(observed(start(url), "<tool><python>print('x' * 20_000)</python></tool>")) < 9_100
    assert env.step("I am done.") == {"observations": [], "reward": 0.0, "done": True, "metadata": {}}


@pytest.mark.slow
def test_a_program_sees_neither_environment_variables_nor_the_network(monkeypatch, url):
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "treasure")
    env = start(url, max_turns=9)
    assert "treasure" not in observed(env, "<tool><python>import os\nprint(dict(os.environ))</python></tool>")
    grab = f"import urllib.request\nprint(urllib.request.urlopen({url!r}, b'{{}}').status)"
    assert "200" not in observed(env, f"<tool><python>{grab}</python></tool>")
    look = "import glob\nfor f in glob.glob('/proc/*/environ'):\n  print(open(f, errors='ignore').read())"
    assert "treasure" not in observed(env, f"<tool><python>{look}</python></tool>")
    assert "failed" in observed(env, "<tool><python>1 / 0</python></tool>")


@pytest.mark.slow
def test_a_program_that_hangs_is_told(url):
    assert "timeout" in observed(start(url, seconds=0.5), "<tool><python>while True: pass</python></tool>")
