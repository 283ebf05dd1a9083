"""A server of the tiny model in a thread of this process, and what the tests ask of it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import uvicorn

from verl.inference.app import create_app
from verl.inference.chat import ChatCodec
from verl.inference.engine_thread import EngineThread
from verl.inference.sessions import Sessions
from verl.utils import hf_tokenizer
from verl.utils.safetensors_file import read_weights, shapes_in
from verl.workers.engine.loading import load_hf_config
from verl.workers.rollout.native import NativeEngine

MODEL = Path(__file__).parents[2] / "data_prep" / "base_model"
NAME = "tiny"
# Like Qwen3's: thinking of turns before the last question goes, and a newline follows the end of a turn.
CHAT_TEMPLATE = """\
{% if tools %}<|im_start|>system
Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- elif m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer(with_template: bool):
    """The tiny model's; with a template it has two tokens more than the model."""
    made = hf_tokenizer(str(MODEL))
    if with_template:
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        made.chat_template = CHAT_TEMPLATE
        made.eos_token = "<|im_end|>"
    return made


class Server(NamedTuple):
    url: str
    client: httpx.Client
    engine: NativeEngine
    thread: EngineThread

    def post(self, path, **body):
        return self.client.post(path, json=body)

    def open(self):
        """(id, path of its chat completions) of a new session."""
        session = self.post("/sessions").json()
        return session["session_id"], f"/sessions/{session['session_id']}/v1/chat/completions"

    def segments(self, session_id):
        return self.client.get(f"/sessions/{session_id}").json()["segments"]


@contextmanager
def serving(token=None, max_turns=1000, max_model_len=1024, max_sessions=4096, max_idle=3600):
    engine = NativeEngine(load_hf_config({"path": str(MODEL)}), 64, max_model_len)
    engine.load_weights(read_weights(MODEL), 0)
    thread = EngineThread(engine, max_turns)
    codec = ChatCodec(tokenizer(False), max_model_len)
    sessions = Sessions(thread, codec, max_sessions, max_idle)
    app = create_app(sessions, NAME, shapes_in(MODEL), token)
    config = uvicorn.Config(app, "127.0.0.1", 0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    running = threading.Thread(target=server.run, daemon=True)
    running.start()
    try:
        while not server.started:
            assert running.is_alive()
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, timeout=120, headers=headers, trust_env=False) as client:
            yield Server(url, client, engine, thread)
    finally:
        server.should_exit = True
        running.join(30)
        assert not running.is_alive()
