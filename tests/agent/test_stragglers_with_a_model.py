"""A straggler as it happens: a real model, the real client, and a server that does not answer one query."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from scripted_engine import prompts
from test_generation_with_a_model import CONFIG, QUESTIONS, model, tokenizer  # noqa: F401  # fixtures
from transformers import Qwen3ForCausalLM

from search_r1.llm_agent.generation import LLMGenerationManager
from search_r1.search.client import SearchClient
from verl.protocol import DataProto
from verl.workers.rollout.native import NativeEngine

FACTOR = 30.0  # times the median; so much that nothing else on the machine makes a straggler


@contextmanager
def server(slow: str | None = None) -> Iterator[str]:
    """Answers every query at once but `slow`, whose answer comes when the block is left."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            if slow in queries:
                ended.wait(60)
            documents = [[{"document": {"contents": f'"{q}"\nabout {q}'}, "score": 1.0}] for q in queries]
            body = json.dumps({"result": documents}).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                pass  # the client is gone

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/retrieve"
    finally:
        ended.set()
        http.shutdown()
        thread.join()
        http.server_close()


def generate(tokenizer, model: Qwen3ForCausalLM, url: str, rows: DataProto, **config) -> DataProto:  # noqa: F811
    engine = NativeEngine(model.config, 16, max_model_len=CONFIG.max_prompt_length)
    engine.load_weights(model.state_dict().items(), 1)
    settings = replace(CONFIG, search_delay_steps=None, topk=1, **config)
    with SearchClient(url, timeout=60) as client:
        output = LLMGenerationManager(tokenizer, engine, client, settings).run_llm_loop(rows)
    assert engine.stats()["running"] == engine.stats()["parked"] == 0
    return output


def in_pairs(tokenizer) -> DataProto:  # noqa: F811
    """The questions; two rows are a group."""
    rows = prompts(tokenizer, QUESTIONS)
    rows.non_tensor_batch["uid"] = np.array([f"pair-{i // 2}" for i in range(len(QUESTIONS))], dtype=object)
    return rows


@pytest.mark.slow
def test_a_batch_does_not_wait_for_a_server_that_does_not_answer(tokenizer, model):  # noqa: F811
    with server() as url:
        undisturbed = generate(tokenizer, model, url, in_pairs(tokenizer))
    records = undisturbed.non_tensor_batch["trajectory"]
    askers = Counter(turn["query"] for record in records for turn in record["turns"] if turn["documents"])
    row, query = next(
        (row, turn["query"])
        for row, record in enumerate(records)
        for turn in record["turns"]
        if turn["documents"] and askers[turn["query"]] == 1
    )
    others = [i for i in range(len(QUESTIONS)) if i != row]

    with server(slow=query) as url:
        cut = generate(tokenizer, model, url, in_pairs(tokenizer), straggler_factor=FACTOR)
    assert cut.non_tensor_batch["trajectory"][row]["finish_reason"] == "cut"
    assert cut.batch["response_mask"][row].sum() == cut.batch["rollout_log_probs"][row].abs().sum() == 0
    for key in ("responses", "response_mask"):
        assert torch.equal(cut.batch[key][others], undisturbed.batch[key][others]), key
