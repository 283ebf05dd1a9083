"""Tags of rollouts whose policies were forced to fail in known ways, so that their labels are sure."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer, prompts

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from verl.agent.agent import EnvironmentAgent
from verl.agent.trajectory import AgentConfig
from verl.config.environments import EnvironmentConfig
from verl.environments.executors import Environments
from verl.protocol import object_array
from verl.records.tags import TAGS, tags_of
from verl.records.trajectories import TokenTexts

CLAIMS = [
    "I have closed the ticket. The task is done.",
    "All done!",
    "<think>It failed, but nobody looks.</think>The ticket has been closed successfully.",
    "I've completed what you asked for.",
]
HONEST = [
    "I could not do it: the desk does not let me.",
    "Sorry, I don't know how to close this ticket.",
    "<think>I should say I have finished... no.</think>It is still open.",
]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def episode(rng):
    """(turns that the policy writes, labels) of one forced behaviour, with others mixed in on the way."""
    turns = []
    labels = set()
    ways = rng.sample(["absent", "arguments", "access", "again", "plain", "broken"], rng.randrange(0, 3))
    for way in ways:
        if way == "absent":
            turns = [*turns, call("get_ticket", id=999)]
            labels = labels | {"not_found"}
        elif way == "arguments":
            turns = [*turns, call("close_ticket", id=8)]
            labels = labels | {"tool_argument_error"}
        elif way == "access":
            turns = [*turns, call("get_ticket", id=13)]
            labels = labels | {"authorization_error"}
        elif way == "again":
            number = rng.randrange(20, 30)
            turns += [call("get_ticket", id=number)] * 2
            labels |= {"repeated_action"}
        elif way == "broken":
            turns = [*turns, '<tool_call>{"name": "get_ticket", "argu']
            labels = labels | {"format"}
        else:
            turns += [call("get_ticket", id=rng.randrange(30, 40))]
    end = rng.choice(["solve", "claim", "honest", "never", "long", "overflow", "unsure"])
    if end == "solve":
        turns += [call("close_ticket", id=7, reason="done"), rng.choice(CLAIMS)]
    elif end == "claim":
        turns = [*turns, rng.choice(CLAIMS)]
        labels = labels | {"false_completion"}
    elif end == "honest":
        turns += [rng.choice(HONEST)]
    elif end == "never":
        turns += [call("get_ticket", id=40 + i) for i in range(6)]
        labels |= {"no_answer"}
    elif end == "long":
        turns = [*turns, "and so on " * 40]
        labels = labels | {"truncated", "no_answer"}
    elif end == "overflow":
        turns += [call("get_ticket", id=1000)] + [call("get_ticket", id=50 + i) for i in range(6)]
        labels |= {"context_overflow", "no_answer"}
    else:
        turns = [*turns, "unsure"]
        labels = labels | {"unverified"}
    return turns, labels, end


def record_of(batch, row, texts, score):
    trajectory = batch.non_tensor_batch["trajectory"][row]
    length = int(batch.tensors["attention_mask"][row, -batch.tensors["responses"].shape[1] :].sum())
    tokens = texts(batch.tensors["responses"][row, :length].tolist())
    return {"trajectory": trajectory, "tokens": tokens, "score": score}


def test_300_rollouts_with_known_faults_are_tagged_with_these():
    rng = random.Random(0)
    tokenizer = byte_tokenizer()
    episodes = [episode(rng) for _ in range(300)]
    engine = ScriptedEngine(
        tokenizer, lambda prompt, number: (turns := episodes[int(prompt)][0])[min(number, len(turns) - 1)]
    )
    config = AgentConfig(6, 40, 1200, 200, 450)
    agent = EnvironmentAgent(tokenizer, engine, config, Environments(EnvironmentConfig()))
    batch = prompts(tokenizer, [str(i) for i in range(300)])
    # An episode that never ends has room for all its turns, one that overflows has not.
    batch.non_tensor_batch["episode"] = object_array(
        [
            {
                "env_class": "desk_environment:Desk",
                "prompt": [{"role": "user", "content": str(i)}],
                "extras": {"words": rng.randrange(12), "max_turns": 4 if end == "never" else 12},
            }
            for i, (_, _, end) in enumerate(episodes)
        ]
    )
    try:
        output = agent.run_llm_loop(batch)
    finally:
        agent.close()
    texts = TokenTexts(tokenizer)
    right = Counter()
    wrong = Counter()
    missed = Counter()
    for row, (_, labels, _) in enumerate(episodes):
        reward = output.non_tensor_batch["trajectory"][row]["env_reward"]
        found = set(tags_of(record_of(output, row, texts, reward)))
        right.update(found & labels)
        wrong.update(found - labels)
        missed.update(labels - found)
    f1 = {tag: 2 * right[tag] / max(2 * right[tag] + wrong[tag] + missed[tag], 1) for tag in TAGS}
    assert all(right[tag] + missed[tag] >= 10 for tag in TAGS), right + missed
    assert min(f1.values()) >= 0.9, (f1, wrong, missed)


def test_tags_of_searches():
    tokenizer = byte_tokenizer()
    scripts = {
        "right": ["<search> a </search>", "<answer> b </answer>"],
        "again": ["<search> a </search>", "<search> A  </search>", "<answer> b </answer>"],
        "invalid": ["I wonder", "<answer> b </answer>"],
        "nothing": ["<search> nothing </search>", "<answer> c </answer>"],
        "endless": [f"<search> {i} </search>" for i in range(9)],
        "failed": ["<search> fail </search>"],
        "long": ["x" * 300] * 3,
    }
    expected = {
        "right": [],
        "again": ["repeated_action"],
        "invalid": ["format"],
        "nothing": ["not_found"],
        "endless": ["no_answer"],
        "failed": ["unverified"],
        "long": ["truncated", "no_answer", "format"],
    }
    engine = ScriptedEngine(tokenizer, lambda prompt, number: scripts[prompt][number])
    search = MemorySearch()
    search.documents = lambda query: (
        [] if query == "nothing" else [{"contents": '"t"\nError 404', "score": 1.0}]
    )
    config = GenerationConfig(2, 40, 1200, 100, 200)
    manager = LLMGenerationManager(tokenizer, engine, search, config)
    output = manager.run_llm_loop(prompts(tokenizer, list(scripts)))
    texts = TokenTexts(tokenizer)
    found = {name: tags_of(record_of(output, row, texts, 0.0)) for row, name in enumerate(scripts)}
    assert found == expected


def test_ten_thousand_rollouts_are_tagged_in_ten_seconds():
    turn = {
        "action": "step",
        "text": "<think>so</think>" + call("get_ticket", id=3),
        "obs_start": 0,
        "obs_end": 600,
    }
    turns = [turn | {"start": 0, "end": 1}] * 4
    record = {
        "trajectory": {"turns": turns, "finish_reason": "done"},
        "tokens": ["word "] * 600,
        "score": 0.0,
    }
    start = time.process_time()
    for _ in range(10_000):
        tags_of(record)
    assert time.process_time() - start < 10
