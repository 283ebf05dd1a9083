"""Run an engine behind HTTP: python -m verl.inference --model FOLDER (see app.py and docs/inference.md)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import uvicorn

from verl.agent.trajectory import generation_eos_ids
from verl.config.policy import Policy, Rollout
from verl.inference.app import create_app
from verl.inference.chat import ChatCodec
from verl.inference.engine_thread import EngineThread
from verl.inference.sessions import Sessions
from verl.sessions.engine_contract import TIED_HEAD, EngineUnavailable
from verl.utils import hf_tokenizer
from verl.utils.device import get_device_name
from verl.utils.safetensors_file import read_weights, shapes_in
from verl.workers.engine.loading import DTYPES, load_hf_config
from verl.workers.rollout.build import EngineRequest, build_rollout_engine

THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
GRACE_SECONDS = 5
SWITCH_SECONDS = 0.0005  # a step must not wait longer for the Python code of a handler


def main(arguments: list[str] | None = None) -> None:
    """Run the server of an engine until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m verl.inference", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder with *.safetensors")
    parser.add_argument("--model_name", help="what clients call it (its folder's name)")
    parser.add_argument("--engine", default="auto", choices=["auto", "native", "vllm"])
    parser.add_argument("--host", default="127.0.0.1", help="any other needs --api_key_var")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--api_key_var", help="environment variable with the bearer token that clients need")
    parser.add_argument("--max_num_seqs", type=int, default=256, help="turns that are decoded at once")
    parser.add_argument("--max_queue", type=int, default=4096, help="turns, waiting ones too; above: 429")
    parser.add_argument("--max_model_len", type=int, help="tokens of prompt and reply (the model's)")
    parser.add_argument("--max_sessions", type=int, default=4096, help="that are held at once; above: 429")
    parser.add_argument("--session_seconds", type=float, default=3600, help="that a session may be idle")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: bf16 on CUDA")
    parser.add_argument("--kv_cache_gb", type=float, help="on CPU: GiB of KV cache (at most 4)")
    args = parser.parse_args(arguments)
    minimums = {
        "max_num_seqs": 1,
        "max_queue": 1,
        "max_sessions": 1,
        "session_seconds": 1,
        "max_model_len": 2,
    }
    for name, minimum in minimums.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            parser.error(f"--{name} is {value}; expected {minimum} or more")
    token = os.environ.get(args.api_key_var) if args.api_key_var else None
    if args.api_key_var and not token:
        parser.error(f"the environment has no {args.api_key_var}; expected the token that clients need")
    if token is None and args.host not in THIS_MACHINE:
        parser.error(f"--host {args.host} is open to others: set --api_key_var NAME, or listen on 127.0.0.1")

    folder = Path(args.model).expanduser()
    device = torch.device(get_device_name())
    try:
        shapes = shapes_in(folder)
        model = Policy(path=str(folder))
        text_config = load_hf_config({"path": str(folder)}).get_text_config()
        if text_config.tie_word_embeddings:
            shapes.pop(TIED_HEAD, None)
        length = args.max_model_len or text_config.max_position_embeddings
        codec = ChatCodec(hf_tokenizer(str(folder)), length, generation_eos_ids(str(folder)))
        dtype = DTYPES.get(args.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
        rollout = Rollout(name=args.engine, max_num_seqs=args.max_num_seqs, kv_cache_gb=args.kv_cache_gb)
        engine = build_rollout_engine(rollout, model, EngineRequest(device, dtype, length, args.max_num_seqs))
        engine.load_weights(read_weights(folder), 0)
    except (ValueError, EngineUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

    def end() -> None:
        server.should_exit = True

    thread = EngineThread(engine, args.max_queue, on_failure=end)
    sessions = Sessions(thread, codec, args.max_sessions, args.session_seconds)
    app = create_app(sessions, args.model_name or folder.resolve().name, shapes, token)
    config = uvicorn.Config(app, args.host, args.port, log_level="info", access_log=False)
    config.timeout_graceful_shutdown = GRACE_SECONDS
    config.timeout_keep_alive = 75
    server = uvicorn.Server(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    server.run()
    if not server.started or not thread.ended_well:
        sys.exit(3)
