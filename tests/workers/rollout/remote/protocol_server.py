"""A small HTTP server that speaks what the engine needs of vLLM's protocol, with faults on demand.

Its "model" is a hash: the next token depends on all tokens so far, on the seed, on the version of the
weights, and on the version under which the prefix was computed, so that stale KV state shows. `expected_turn`
is the same thing without a server.
"""

import json
import select
import socket
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

VOCABULARY = 256
EXTENSION = "verl.workers.rollout.vllm.weight_transfer.WeightReceiver"


def next_token(tokens, version, kv_version, seed=0):
    return zlib.crc32(repr((list(tokens), version, kv_version, seed)).encode()) % VOCABULARY


def log_prob(token_id):
    return -token_id / 100.0


def expected_turn(context, length, version, seed=0):
    """What a turn samples behind `context` with weights `version` and no stale state."""
    tokens = list(context)
    for _ in range(length):
        tokens.append(next_token(tokens, version, version, seed))
    return tokens[len(context) :]


class ProtocolServer:
    """Use as a context manager; `url` is its address.

    Faults: `garbage` (a line sent in the place of the first chunk), `early_stop` (each request ends after so
    many tokens with finish reason "stop"), `refuses_weights`, `refuses_from` (a version of them). A sequence
    of `holds_at` tokens, its prompt among them, waits until `holds_at` is another number or its request is
    broken off.
    """

    def __init__(self):
        self.label = "default"
        self.weights = None
        self.kv_version = None
        self.paused = False
        self.pauses = 0
        self.garbage = self.early_stop = None
        self.refuses_weights = False
        self.refuses_from = float("inf")
        self.holds_at = None
        self.max_model_len = 512
        self.extension = EXTENSION
        self.mode = "processed_logprobs"
        self.is_in_dev_mode = True
        self.serves_tokens = True
        self.requests = []
        self.dropped = 0
        self.calls = []
        self.dead = False
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """The end of the process: nobody listens any more, open streams break."""
        self.dead = True  # ends open streams
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, answer, status=200):
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                path = urlsplit(self.path).path
                if path == "/health":
                    self.reply("")
                elif path == "/v1/models":
                    self.reply({"data": [{"id": "policy", "max_model_len": server.max_model_len}]})
                elif path == "/metrics":
                    self.reply(
                        '# HELP x\nvllm:prompt_tokens_total{engine="0"} 7\nvllm:kv_cache_usage_perc{} 0.5\n'
                    )
                elif path == "/server_info":
                    config = {
                        "parallel_config": {"worker_extension_cls": server.extension},
                        "model_config": {"logprobs_mode": server.mode},
                    }
                    if not server.is_in_dev_mode:
                        return self.reply("", 404)
                    self.reply({"vllm_config": config})
                else:
                    self.reply("", 404)
                return None

            def do_POST(self):
                url = urlsplit(self.path)
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
                if url.path == "/inference/v1/generate":
                    return self.complete(body)
                server.calls.append(url.path)
                if url.path == "/pause":
                    server.paused = True
                    server.pauses = server.pauses + 1
                elif url.path == "/resume":
                    server.paused = False
                elif url.path == "/update_weight_version":
                    server.label = body["new_version"]
                elif url.path == "/reset_prefix_cache":
                    assert parse_qs(url.query) == {"reset_running_requests": ["true"]}
                    server.kv_version = None
                    return self.reply({"success": True})
                elif url.path == "/collective_rpc":
                    if body["method"] == "rollout_receive":
                        version = int(body["kwargs"]["version"])
                        if server.refuses_weights or version >= server.refuses_from:
                            return self.reply("missing weights", 500)
                        server.weights = version
                    return self.reply({"results": [body["kwargs"].get("version")]})
                self.reply({"status": "done"})

            def complete(self, body):
                if "token_ids" not in body:
                    return self.reply("", 400 if server.serves_tokens else 403)
                server.requests.append(body)
                if len(body["token_ids"]) + body["sampling_params"]["max_tokens"] > server.max_model_len:
                    return self.reply({"error": {"message": "too long"}}, 400)
                self.send_response(200)
                self.end_headers()
                try:
                    if server.garbage is not None:
                        self.wfile.write(server.garbage.encode() + b"\n\n")
                    self.stream(body)
                except OSError:
                    server.dropped += 1
                return None

            def stream(self, body):
                pauses = server.pauses
                tokens = list(body["token_ids"])
                sampling = body["sampling_params"]
                sent = 0
                pending = []
                reason = None
                while reason is None:
                    while pauses == server.pauses and (server.paused or len(tokens) == server.holds_at):
                        if server.dead or self.gone():
                            server.dropped += 1
                            return
                        time.sleep(0.001)
                    time.sleep(0)  # another thread's turn
                    if server.dead:
                        return
                    if pauses != server.pauses:
                        reason = "abort"
                    else:
                        if server.kv_version is None:
                            server.kv_version = server.weights
                        seed = (
                            sampling["seed"] if "seed" in sampling else sampling["extra_args"]["session_seed"]
                        )
                        tokens.append(next_token(tokens, server.weights, server.kv_version, seed))
                        pending.append(tokens[-1])
                        sent += 1
                        if tokens[-1] in sampling["stop_token_ids"] or sent == server.early_stop:
                            reason = "stop"
                        elif sent == sampling["max_tokens"]:
                            reason = "length"
                    if reason or len(pending) >= sampling["stream_interval"] or sent == 1:
                        self.send_chunk(pending, reason)
                        pending = []
                self.wfile.write(b"data: [DONE]\n\n")

            def gone(self):
                readable, _, _ = select.select([self.connection], [], [], 0)
                return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

            def send_chunk(self, tokens, reason):
                content = []
                for token in tokens:
                    top = [{"token_id": token, "logprob": log_prob(token)}]
                    top.append({"token_id": VOCABULARY, "logprob": 2 * log_prob(token)})
                    content.append({"token_id": token, "logprob": log_prob(token), "top_logprobs": top})
                choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason}
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                self.wfile.flush()

        return Handler
