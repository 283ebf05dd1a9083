"""The server of the tiny model over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from served import MODEL, NAME, serving, tokenizer
from transformers import AutoModelForCausalLM

from verl.inference.server import main, model_folder, name_of
from verl.utils import serving as door
from verl.utils.model_folders import run_settings
from verl.workers.rollout.native import NativeEngine

QUESTION = {"role": "user", "content": "Question: Who directed Amber Harbor?"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def guarded():
    with serving(token="a secret") as running:
        yield running


def chat(server, *messages, path="/v1/chat/completions", **more):
    reply = server.post(path, messages=[QUESTION, *messages], **({"max_tokens": 8} | more))
    assert reply.status_code == 200, reply.text
    return reply.json()


def code_of(reply):
    body = reply.json()
    assert body.keys() == {"error"} and body["error"]["message"] and body["error"]["type"]
    return reply.status_code, body["error"]["code"]


def events(server, path, body):
    with server.client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_greedy_reply_is_the_engines(server):
    reply = chat(server, temperature=0, logprobs=True)
    made = tokenizer(False)
    assert reply["prompt_token_ids"] == made.encode(QUESTION["content"])
    (choice,) = reply["choices"]
    direct = server.post(
        "/inference/v1/generate",
        token_ids=reply["prompt_token_ids"],
        sampling_params={"temperature": 0, "max_tokens": 8},
    ).json()["choices"][0]
    assert choice["token_ids"] == direct["token_ids"] and len(choice["token_ids"]) == 8
    assert choice["message"] == {"role": "assistant", "content": made.decode(choice["token_ids"])}
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    expected = [each["logprob"] for each in direct["logprobs"]["content"]]
    assert [each["logprob"] for each in content] == pytest.approx(expected, abs=1e-5)
    assert (choice["finish_reason"], choice["weight_version"]) == ("length", 0)
    assert reply["usage"]["completion_tokens"] == 8


def test_seeds_n_and_several_prompts(server):
    body = {"prompt": ["Question: a", "b"], "n": 2, "max_tokens": 6, "seed": 5, "logprobs": 0}
    first, again = (server.post("/v1/completions", **body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]] and len(set(texts)) == 4
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert all("".join(c["logprobs"]["tokens"]) == c["text"] for c in first["choices"])
    other = server.post("/v1/completions", **body | {"seed": None}).json()
    assert texts != [choice["text"] for choice in other["choices"]]
    ids = server.post("/v1/completions", prompt=[65, 66], max_tokens=3).json()["choices"][0]
    assert ids["prompt_token_ids"] == [65, 66] and len(ids["token_ids"]) == 3


@pytest.mark.parametrize("more", [{}, {"stop": "</search>"}, {"tools": [TOOL]}, {"n": 3}, {"max_tokens": 60}])
def test_a_stream_says_what_a_whole_reply_says(server, more, monkeypatch):
    def step():  # when the event loop has taken the last step's tokens, also on a busy machine
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.thread._loop).result(60)
        return NativeEngine.step(server.engine)

    monkeypatch.setattr(server.engine, "step", step)
    body = {"messages": [QUESTION], "seed": 3, "max_tokens": 20, "logprobs": True} | more
    whole = server.post("/v1/chat/completions", **body).json()
    chunks = events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        text = "".join(piece["delta"].get("content") or "" for piece in pieces)
        assert text == choice["message"]["content"]
        assert {k: pieces[-1][k] for k in ("finish_reason", "token_ids")} == {
            k: choice[k] for k in ("finish_reason", "token_ids")
        }
        assert len(pieces[-1]["logprobs"]["content"]) == len(choice["token_ids"])
    assert sum(bool(c["choices"][0]["delta"].get("content")) for c in chunks) > 1


def test_a_session_prefills_new_tokens_only_and_keeps_what_was_sampled(server):
    session, path = server.open()
    messages = [QUESTION]
    sampled = []
    prefilled = []
    for number in range(3):
        before = server.engine.stats()["prefilled_tokens"]
        reply = server.post(path, messages=messages, max_tokens=12, seed=1, stop=["</search>"]).json()
        prefilled.append(server.engine.stats()["prefilled_tokens"] - before)
        sampled.append(reply["choices"][0]["token_ids"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"\n\nwell {number}\n\n"}]
    (segment,) = server.segments(session)
    new = [b[0] - a[1] for a, b in zip(segment["turns"], segment["turns"][1:], strict=False)]
    assert prefilled[1:] == [number + 1 for number in new]  # and the last token of the turn before
    assert [segment["response_ids"][start:end] for start, end in segment["turns"]] == sampled
    assert sum(segment["response_mask"]) == sum(map(len, sampled))
    ids = segment["prompt_ids"] + segment["response_ids"][: segment["turns"][1][0]]
    whole = server.post(
        "/inference/v1/generate", token_ids=ids, sampling_params={"temperature": 0, "max_tokens": 1}
    )
    assert whole.status_code == 200


def test_rewritten_history_starts_a_segment_and_a_turn_given_up_leaves_no_trace(server):
    session, path = server.open()
    reply = chat(server, path=path)["choices"][0]
    changed = {**reply["message"], "content": reply["message"]["content"] + " indeed"}
    chat(server, changed, {"role": "user", "content": "and?"}, path=path)
    assert len(server.segments(session)) == 2
    history = [QUESTION, reply["message"], {"role": "user", "content": "so?"}]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json={"messages": history, "ignore_eos": True}, timeout=0.05)
    wait_until(lambda: server.thread.num_turns == 0)
    assert [len(segment["turns"]) for segment in server.segments(session)] == [1, 1]
    body = {"messages": history, "max_tokens": 4, "seed": 2}
    assert server.post(path, **body).status_code == 200
    assert [len(segment["turns"]) for segment in server.segments(session)] == [2, 1]


def test_a_session_that_is_opened_anew_in_the_engine_samples_what_it_would_have_sampled(server):
    """Its draws go on behind the tokens that it has sampled; those that it has read take no number."""
    replies = []
    for is_interrupted in (False, True):
        _, path = server.open()
        history = [QUESTION]
        for number in range(3):
            if is_interrupted and number == 2:
                with pytest.raises(httpx.ReadTimeout):
                    body = {"messages": history, "seed": 6, "temperature": 2, "ignore_eos": True}
                    httpx.post(server.url + path, json=body, timeout=0.05)
                wait_until(lambda: server.thread.num_turns == 0)
            reply = chat(server, *history[1:], path=path, seed=6, temperature=2)["choices"][0]
            history += [reply["message"], {"role": "user", "content": f"and then, {number}?"}]
        replies.append(reply["token_ids"])
    assert replies[0] == replies[1] and len(replies[0]) > 3


def test_a_finished_session_has_its_reward_and_takes_nothing_more(server):
    session = server.post("/sessions", uid="group 7").json()["session_id"]
    path = f"/sessions/{session}"
    chat(server, path=f"{path}/v1/chat/completions")
    assert code_of(server.post(f"{path}/finish", reward=1, turn_rewards=[1, 2])) == (400, "invalid_request")
    outcome = {"reward": 0.5, "turn_rewards": [0.5], "metadata": {"task": "x"}}
    assert server.post(f"{path}/finish", **outcome).status_code == 200
    assert code_of(server.post(f"{path}/finish", **outcome)) == (409, "session_finished")
    late = server.post(f"{path}/v1/chat/completions", messages=[QUESTION])
    assert code_of(late) == (409, "session_finished")
    about = server.client.get(path).json()
    assert {name: about[name] for name in outcome} == outcome and about["uid"] == "group 7"
    assert server.client.delete(path).status_code == 200
    assert code_of(server.client.get(path)) == (404, "session_not_found")


def test_finishing_ends_a_turn_under_way(server):
    session, path = server.open()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, path, messages=[QUESTION], ignore_eos=True)
        wait_until(lambda: server.thread.num_turns == 1)
        assert server.post(f"/sessions/{session}/finish", reward=0).status_code == 200
        assert code_of(running.result(30)) == (409, "session_finished")
    wait_until(lambda: server.thread.num_turns == 0)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("chat/completions", {"messages": []}, (400, "invalid_request")),
        ("chat/completions", {"messages": [QUESTION], "top_logprobs": 3}, (400, "invalid_request")),
        (
            "chat/completions",
            {"messages": [QUESTION], "response_format": {"type": "json_object"}},
            (400, "invalid_request"),
        ),
        ("chat/completions", {"messages": [QUESTION], "temperature": 1e-9}, (400, "invalid_request")),
        ("chat/completions", {"messages": [QUESTION], "model": "gpt"}, (404, "model_not_found")),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "word " * 2000}]},
            (400, "context_length_exceeded"),
        ),
        ("completions", {"prompt": [[1] * 1024]}, (400, "context_length_exceeded")),
        ("completions", {"prompt": [5000]}, (400, "invalid_request")),
        ("completions", {"prompt": ["a"] * 100, "n": 2}, (400, "invalid_request")),
        ("completions", {"prompt": "a", "logprobs": 21}, (400, "invalid_request")),
        ("nothing", {}, (404, "invalid_request")),
    ],
)
def test_what_can_not_be_done_is_refused_in_openais_form(server, path, body, expected):
    assert code_of(server.post(f"/v1/{path}", **body)) == expected


def test_a_lone_surrogate_and_a_broken_body_are_refused(server):
    for body in (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages', b"\xff"):
        reply = server.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 400 and reply.json()["error"]


HALF = "\ud83d"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {HALF: {"x": [HALF]}}}}]},
        {
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"q": HALF})}}],
                },
                {"role": "tool", "content": "x"},
            ]
        },
        {"tool_choice": {"x": HALF}},
        {"chat_template_kwargs": None, HALF: HALF},
    ],
)
def test_half_an_emoji_anywhere_is_replaced_or_refused(server, more):
    body = json.dumps({"messages": [QUESTION], "max_tokens": 2} | more)
    headers = {"content-type": "application/json"}
    for path in ("/v1/chat/completions", server.open()[1]):
        reply = server.client.post(path, content=body, headers=headers)
        assert reply.status_code in (200, 400), reply.text
    session, _ = server.open()
    body = json.dumps({"reward": 1, "metadata": {"note": HALF}})
    assert server.client.post(f"/sessions/{session}/finish", content=body, headers=headers).status_code == 200
    assert server.client.get(f"/sessions/{session}").json()["metadata"] == {"note": "\ufffd"}


def test_a_model_is_retrieved_by_its_name(server):
    session, _ = server.open()
    for base in ("", f"/sessions/{session}"):
        (listed,) = server.client.get(f"{base}/v1/models").json()["data"]
        assert server.client.get(f"{base}/v1/models/{NAME}").json() == listed
        assert code_of(server.client.get(f"{base}/v1/models/a/b")) == (404, "model_not_found")


def test_generate_speaks_as_vllm_does(server):
    """As the client of PRIME-RL's and verifiers' renderers reads it."""
    sampling = {"max_tokens": 20, "seed": 3, "logprobs": 1, "skip_special_tokens": False}
    body = {"model": NAME, "token_ids": [65, 66, 67], "cache_salt": "x", "priority": 0}
    whole = server.post("/inference/v1/generate", **body, sampling_params=sampling).json()
    (choice,) = whole["choices"]
    number = len(choice["token_ids"])
    assert whole["request_id"]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": number, "total_tokens": 3 + number}
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token_id}" and isinstance(entry["logprob"], float)
    stop = choice["token_ids"][5]
    end = choice["token_ids"].index(stop) + 1
    for more in ({}, {"ignore_eos": True}):
        stopped = sampling | {"stop_token_ids": [stop], **more}
        (cut,) = server.post("/inference/v1/generate", **body, sampling_params=stopped).json()["choices"]
        assert cut["token_ids"] == choice["token_ids"][:end] and cut["finish_reason"] == "stop"
    refused = server.post("/inference/v1/generate", token_ids=[65], features={"kwargs_data": "x"})
    assert code_of(refused) == (400, "invalid_request") and "features" in refused.text
    other = server.post("/inference/v1/generate", token_ids=[65], model="other")
    assert code_of(other) == (404, "model_not_found")


def test_log_likelihoods_are_the_models(server):
    """As lm-eval's local-completions asks for them, compared with the model of transformers."""
    made = tokenizer(False)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    contexts = [made.encode("Question: Who directed Amber"), made.encode("The town of")]
    texts = [ids + made.encode(" Harbor? It was") for ids in contexts]
    body = {"model": NAME, "prompt": texts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    reply = server.post("/v1/completions", **body, seed=1234).json()
    for ids, choice in zip(texts, reply["choices"], strict=True):
        log_probs = choice["logprobs"]
        whole = ids + choice["token_ids"]
        assert log_probs["tokens"] == [made.decode([token_id]) for token_id in whole]
        assert choice["text"] == "".join(log_probs["tokens"])
        expected = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(whole[1:])[:, None])[:, 0].tolist()
        assert log_probs["token_logprobs"][0] is None and log_probs["top_logprobs"][0] is None
        assert log_probs["token_logprobs"][1:] == pytest.approx(chosen, abs=1e-4)
        for place, own, row in zip(
            log_probs["top_logprobs"][1:], log_probs["token_logprobs"][1:], expected, strict=True
        ):
            assert max(place.values()) == pytest.approx(row.max().item(), abs=1e-4)
            assert (own == max(place.values())) == (own == pytest.approx(row.max().item(), abs=1e-4))
        # The token that was sampled greedily is the most probable one.
        assert log_probs["token_logprobs"][-1] == max(log_probs["top_logprobs"][-1].values())
    scored = server.post("/v1/completions", **body | {"max_tokens": 0, "logprobs": 0}).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"] == reply["choices"][0]["logprobs"]["token_logprobs"][:-1]
    assert scored["token_ids"] == [] and scored["logprobs"]["top_logprobs"] is None
    more = server.post("/v1/completions", prompt=texts[0], max_tokens=3, logprobs=5).json()["choices"][0]
    assert len(more["logprobs"]["tokens"]) == 3 and more["text"] == made.decode(more["token_ids"])
    assert all(5 <= len(place) <= 6 for place in more["logprobs"]["top_logprobs"])
    for bad in ({"max_tokens": 0}, {"stream": True, "echo": True}, {"logprobs": 21}):
        assert code_of(server.post("/v1/completions", prompt="a", **bad)) == (400, "invalid_request")


def test_a_request_that_is_refused_for_one_prompt_ends_the_others(server):
    before = server.engine.stats()["generated_tokens"]
    bad = {"prompt": [[5], [5, 10**6]], "max_tokens": 900, "ignore_eos": True, "n": 8}
    assert code_of(server.post("/v1/completions", **bad)) == (400, "invalid_request")
    wait_until(lambda: server.thread.num_turns == 0 and server.engine.stats()["running"] == 0)
    assert server.engine.stats()["generated_tokens"] - before < 8 * 800


def test_a_full_server_says_when_to_come_again():
    with serving(max_turns=2, max_sessions=1) as server, ThreadPoolExecutor(2) as pool:
        slow = [
            pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=900, ignore_eos=True)
            for _ in "ab"
        ]
        wait_until(lambda: server.thread.num_turns == 2)
        full = server.post("/v1/chat/completions", messages=[QUESTION])
        assert code_of(full) == (429, "server_full") and full.headers["retry-after"]
        assert all(each.result().status_code == 200 for each in slow)
        server.open()
        assert code_of(server.post("/sessions")) == (429, "too_many_sessions")


def test_idle_sessions_are_dropped_and_leave_nothing_in_the_engine():
    with serving(max_idle=0.3) as server:
        session, path = server.open()
        chat(server, path=path)
        assert server.engine.stats()["parked"] == 1
        wait_until(lambda: server.engine.stats()["parked"] == 0)
        assert code_of(server.client.get(f"/sessions/{session}")) == (404, "session_not_found")


def test_without_the_token_there_is_only_health(guarded, server):
    for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/sessions/x", "/nothing"):
        reply = httpx.get(guarded.url + path)
        assert code_of(reply) == (401, "invalid_api_key") and reply.headers["www-authenticate"] == "Bearer"
    for header in ("Bearer wrong", "a secret", "Bearer", "Bearer a secret "[:-3]):
        for path in ("/v1/chat/completions", "/pause", "/update_weights", "/sessions"):
            reply = httpx.post(guarded.url + path, json={}, headers={"Authorization": header})
            assert reply.status_code == 401
    assert httpx.get(guarded.url + "/health").json()["status"] == "healthy"
    assert [m["id"] for m in guarded.client.get("/v1/models").json()["data"]] == [NAME]
    for path in ("/pause", "/resume", "/update_weights"):
        assert server.post(path).status_code == 404
        assert path not in server.client.get("/openapi.json").json()["paths"]


def wait_until(holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def other_weights(tmp_path):
    weights = load_file(MODEL / "model.safetensors")
    save_file({name: tensor * 0.9 for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    return str(tmp_path)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_weight_update_fails_no_request(guarded, other_weights, mode):
    version = guarded.engine.version + 1
    with ThreadPoolExecutor(9) as pool:
        body = {"prompt": "Question: ", "max_tokens": 300, "ignore_eos": True}
        early = [pool.submit(guarded.post, "/v1/completions", **body) for _ in range(8)]
        wait_until(lambda: guarded.engine.stats()["running"] == 8)
        assert guarded.client.post(f"/pause?mode={mode}").json() == {"paused": mode}
        done = [each.done() for each in early]
        assert guarded.engine.has_runnable == (mode == "keep") and not (mode == "keep" and any(done))
        late = pool.submit(guarded.post, "/v1/completions", **body)
        update = guarded.post("/update_weights", weight_dir=other_weights, version=version)
        assert update.json() == {"version": version}
        time.sleep(0.1)
        assert not late.done() and guarded.client.get("/health").json()["paused"] == mode
        assert guarded.client.post("/resume").json() == {"paused": None}
        choices = [each.result(60).json()["choices"][0] for each in [*early, late]]
    reasons = {choice["finish_reason"] for choice in choices[:-1]}
    assert reasons == {"abort" if mode == "abort" else "length"}
    versions = {choice["weight_version"] for choice in choices[:-1]}
    assert versions == {version if mode == "keep" else version - 1}
    assert choices[-1]["weight_version"] == version and len(choices[-1]["token_ids"]) == 300


def test_versions_of_a_turn_say_where_the_weights_changed(guarded, other_weights):
    session, path = guarded.open()
    version = guarded.engine.version + 1
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(guarded.post, path, messages=[QUESTION], max_tokens=400, ignore_eos=True)
        wait_until(lambda: guarded.engine.stats()["running"] == 1)
        time.sleep(0.05)
        assert guarded.post("/update_weights", weight_dir=other_weights, version=version).status_code == 200
        assert turn.result(60).status_code == 200
    (segment,) = guarded.segments(session)
    versions = segment["versions"]
    assert len(versions) == 400 and versions == sorted(versions) and set(versions) == {version - 1, version}


def test_weights_of_another_model_are_refused_before_anything_is_touched(guarded, tmp_path):
    version = guarded.engine.version
    weights = load_file(MODEL / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), tmp_path / "model.safetensors")
    strange = ["~0", "", "\0", "a" * 300, "a/" * 5000, "/proc/1/root/x"]
    for folder in (tmp_path, tmp_path / "nothing", *strange):
        reply = guarded.post("/update_weights", weight_dir=str(folder), version=version + 1)
        assert code_of(reply) == (400, "invalid_request")
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    reply = guarded.post("/update_weights", weight_dir=str(tmp_path), version=version + 1)
    assert code_of(reply) == (400, "invalid_request")
    assert guarded.engine.version == version and chat(guarded)["choices"]


def test_an_engine_that_fails_says_so_and_nothing_hangs(monkeypatch):
    told = threading.Event()
    with serving() as server:
        server.thread.on_failure = told.set

        def step():
            raise RuntimeError("a broken kernel")

        monkeypatch.setattr(server.engine, "step", step)
        assert code_of(server.post("/v1/completions", prompt="a")) == (503, "engine_failed")
        assert told.wait(10) and not server.thread.ended_well
        assert code_of(server.post("/v1/completions", prompt="a")) == (503, "engine_failed")
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/metrics").status_code == 503


def test_metrics_are_prometheus_text(server):
    from prometheus_client.parser import text_string_to_metric_families

    chat(server)
    reply = server.client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert families["verl_inference_generated_tokens"].samples[0].value > 0
    answers = families["verl_inference_answers"].samples
    assert {"route": "/v1/chat/completions", "status": "200"} in [each.labels for each in answers], reply.text


def test_a_body_has_a_limit(server, monkeypatch):
    monkeypatch.setattr(door, "MAX_BODY_BYTES", 1000)
    for content in (b"x" * 2000, iter([b"x" * 600] * 3)):
        reply = server.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 413 and reply.json()["error"]


@pytest.mark.slow
def test_the_command_serves_behind_a_token_and_ends_when_it_is_told():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--model", str(MODEL), "--port", str(port), "--api_key_var", "A_KEY", "--max_num_seqs", "4"]
    command = [sys.executable, "-m", "verl.inference", *arguments]
    process = subprocess.Popen(command, env=os.environ | {"A_KEY": "k"}, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health"), 120)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        (model,) = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer k"}).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("base_model", 2048)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def answers(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere"], "no folder with *.safetensors"),
        (["--model", str(MODEL.parent)], "no config.json"),
        (["--model", str(MODEL), "--host", "0.0.0.0"], "set --api_key_var"),
        (["--model", str(MODEL), "--api_key_var", "NOT_SET"], "the environment has no NOT_SET"),
        (["--model", str(MODEL), "--max_num_seqs", "0"], "expected 1 or more"),
        (["--model", str(MODEL), "--max_model_len", "1"], "expected 2 or more"),
    ],
)
def test_a_command_that_can_not_be_run_ends_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_run_is_served_under_its_name_and_tells_its_settings(tmp_path):
    model = tmp_path / "my_run" / "global_step_7" / "actor" / "huggingface"
    shutil.copytree(MODEL, model)
    config = {"max_turns": 2, "do_search": True, "retriever": {"topk": 2, "url": "http://inner:8000"}}
    (tmp_path / "my_run" / "config.yaml").write_text(json.dumps(config))
    assert model_folder(str(tmp_path / "my_run")) == model and name_of(model) == "my_run"
    settings = {"max_turns": 2, "do_search": True, "retriever.topk": 2}
    assert run_settings(model) == settings and run_settings(MODEL) == {} and name_of(MODEL) == "base_model"


def test_a_taken_port_is_told_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("verl.inference.server.load", lambda *_: pytest.fail("the model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["--model", str(MODEL), "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2 and "try another --host or --port" in capsys.readouterr().err
