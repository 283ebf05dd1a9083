"""The examples of examples/ run as their docstrings say, and stay short."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import uvicorn

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_40_lines(path):
    assert len(path.read_text().splitlines()) <= 40


def test_the_reward_is_token_f1_of_the_policys_answer():
    from verl.utils.reward_score import load_reward_function

    score = load_reward_function({"path": str(ROOT / "examples/reward.py"), "name": "token_f1"})
    truth = {"target": ["Rome", "the city of Rome"]}
    assert score("nq", "<answer>Rome, Italy</answer>", truth, {})["score"] == pytest.approx(2 / 3)
    assert score("nq", "no answer", truth, {}) == {"score": 0.0, "answered": 0.0}


def test_the_policy_loss_is_found_by_its_path_and_has_the_gradient_of_its_formula():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    loss_fn = get_policy_loss_fn("examples.policy_loss:pulled_reinforce")
    log_prob = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    old = torch.tensor([[-1.5, -2.0, 0.0]])
    advantages = torch.tensor([[2.0, -1.0, 5.0]])
    mask = torch.tensor([[1, 1, 0]])
    loss, metrics = loss_fn(log_prob, old, advantages, mask, "token-mean", None)
    loss.backward()
    assert log_prob.grad.tolist()[0] == pytest.approx([(-2.0 + 0.2 * 0.5) / 2, 0.5, 0.0])
    assert metrics["actor/pull"].item() == pytest.approx(0.125)


def test_the_environment_counts_letters_over_the_turns_of_an_episode():
    from verl.environments import make

    env = make("examples.environment:LetterEnv", env_config={}, extras={"letter": "e"})
    first = env.step("eels e")
    second = env.step("e" * 20)
    assert (first["reward"], second["reward"]) == (0.3, 1.0)
    assert second["observations"][0]["content"].strip() == "e: 13 so far."
    assert env.get_metrics() == {"letters": 13}


@pytest.fixture
def example_server():
    """The example's search engine on a free port; yields its address."""
    from examples import retriever

    server = uvicorn.Server(uvicorn.Config(retriever.app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/retrieve"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def test_the_retriever_answers_the_trainers_client_and_the_agent_searches_in_it(example_server):
    from examples.agent import ask
    from search_r1.search.client import SearchClient

    with SearchClient(example_server, topk=1) as client:
        [[document]] = client.batch_search(["capital of Norway"])
        assert document["contents"].startswith('"Oslo"')
    batch = ask("What is the birthplace of Adela Marrow?", str(ROOT / "data_prep/base_model"), example_server)
    record = batch.non_tensor_batch["trajectory"][0]
    assert record["num_searches"] >= 1 and record["finish_reason"] in ("answer", "max_turns", "length", "eos")
    mask = batch.batch["response_mask"][0]
    log_probs = batch.batch["rollout_log_probs"][0]
    assert mask.sum() > 0 and (log_probs[mask == 0] == 0).all()
