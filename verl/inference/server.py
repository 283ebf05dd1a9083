"""Run an engine behind HTTP: python -m verl.inference --model RUN (see app.py and docs/inference.md).

flags -> model's folder, port -> torch, tokenizer, engine, weights -> the routes, until it is stopped
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.inference.replicas import Replica, replicas_of, run_replicas, visible_gpu_names
from verl.utils.addresses import is_loopback, open_socket
from verl.utils.model_folders import find_model, run_folder, run_settings
from verl.utils.text import printable

if TYPE_CHECKING:  # they import torch, and mistakes are told before
    import torch

    from verl.config.policy import Rollout
    from verl.inference.sessions import Sessions
    from verl.utils.safetensors_file import Shapes

DTYPES = ("fp32", "float32", "bf16", "bfloat16")
GRACE_SECONDS = 5
SWITCH_SECONDS = 0.0005  # a step must not wait longer for the Python code of a handler
COULD_NOT_RUN = 2  # exit status for a mistake of the user
HAS_FAILED = 3  # exit status of a server whose engine has failed


def main(arguments: list[str] | None = None) -> None:
    """Run the server of an engine until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m verl.inference", description=__doc__)
    parser.add_argument("--model", required=True, help="run, or Hugging Face folder with *.safetensors")
    parser.add_argument("--model_name", help="what clients call it (its run's or its folder's name)")
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
    parser.add_argument("--data_parallel_size", type=int, default=1, help="servers, from --port on")
    vllm = parser.add_argument_group("vLLM", "as of vLLM's own server; other engines refuse them")
    vllm.add_argument("--tensor_parallel_size", type=int, help="GPUs that share the model (1)")
    vllm.add_argument("--gpu_memory_utilization", type=float, help="share of a GPU to take (0.9)")
    vllm.add_argument("--quantization", help="of the weights as they are loaded: fp8, fp8_per_block, ...")
    vllm.add_argument("--engine_args", default="{}", help="more of its arguments, as JSON")
    args = parser.parse_args(arguments)
    try:
        args.engine_args = engine_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    minimums = {
        "max_num_seqs": 1,
        "max_queue": 1,
        "max_sessions": 1,
        "session_seconds": 1,
        "max_model_len": 2,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    for name, minimum in minimums.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            parser.error(f"--{name} is {value}; expected {minimum} or more")
    share = args.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        parser.error(f"--gpu_memory_utilization is {share}; expected more than 0 and at most 1")
    token = os.environ.get(args.api_key_var) if args.api_key_var else None
    if args.api_key_var and not token:
        parser.error(f"the environment has no {args.api_key_var}; expected the token that clients need")
    if token is None and not is_loopback(args.host):
        parser.error(f"--host {args.host} is open to others: set --api_key_var NAME, or listen on 127.0.0.1")

    try:
        folder = model_folder(args.model)
        if args.data_parallel_size > 1:
            sys.exit(run_replicas(_replicas(args, arguments)))
        settings = run_settings(folder)
        listener = open_socket(args.host, args.port)
        with listener:
            status = serve(args, folder, settings, token, listener)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        status = COULD_NOT_RUN
    if status:
        sys.exit(status)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that have no key in `rollout`.

    Raises ValueError if --engine_args is no JSON object.
    """
    try:
        more = json.loads(args.engine_args)
    except json.JSONDecodeError as error:
        raise ValueError(f"--engine_args: found {args.engine_args!r} ({error}); expected JSON") from None
    if not isinstance(more, dict):
        example = '{"seed": 1}'
        raise ValueError(f"--engine_args: found {args.engine_args!r}; expected an object, as '{example}'")
    return more if args.quantization is None else {"quantization": args.quantization, **more}


def _replicas(args: argparse.Namespace, arguments: list[str] | None) -> list[Replica]:
    given = sys.argv[1:] if arguments is None else arguments
    gpus_of_each = args.tensor_parallel_size or 1
    return replicas_of(given, args.port, args.data_parallel_size, gpus_of_each, visible_gpu_names())


def rollout_block(args: argparse.Namespace, device: torch.device) -> Rollout:
    """Return the block of the configuration that describes the server's engine.

    Raises ValueError if flags of vLLM are given to another engine.
    """
    from verl.config.policy import Rollout, Vllm
    from verl.workers.rollout.build import engine_name

    rollout = Rollout(
        name=args.engine,
        placement="apart",
        max_num_seqs=args.max_num_seqs,
        kv_cache_gb=args.kv_cache_gb,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_model_parallel_size=args.tensor_parallel_size or 1,
        vllm=Vllm(engine_args=args.engine_args),
    )
    name = engine_name(rollout, device)
    flags = {"tensor_parallel_size": args.tensor_parallel_size, "quantization": args.quantization}
    flags |= {"engine_args": args.engine_args}
    given = [flag for flag, value in flags.items() if value]
    if name != "vllm" and given:
        raise ValueError(f"--{given[0]} is for vLLM: found the engine {name}; expected --engine vllm")
    return rollout


def model_folder(model: str) -> Path:
    """Return the folder of a model: that of a run's newest checkpoint, or the folder itself.

    Raises ValueError if it has no weights.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = Path(find_model(str(path)))
    if not any(path.glob("*.safetensors")):
        raise ValueError(
            f"--model: found no folder with *.safetensors at {model}; expected a run, as "
            "verl_checkpoints/NAME, or a Hugging Face folder"
        )
    return path


def name_of(folder: Path) -> str:
    """Return what clients call a model: the name of its run, or else of its folder."""
    run = run_folder(folder)
    return (folder.resolve() if run is None else run).name


def load(args: argparse.Namespace, folder: Path) -> tuple[Sessions, Shapes]:
    """Load the model and its engine, and return the sessions over it and the shapes of its weights.

    Raises ValueError or EngineUnavailable if it can't be run.
    """
    import torch

    from verl.agent.trajectory import generation_eos_ids
    from verl.config.policy import Policy
    from verl.inference.chat import ChatCodec
    from verl.inference.engine_thread import EngineThread
    from verl.inference.sessions import Sessions
    from verl.sessions.engine_contract import TIED_HEAD
    from verl.utils import check_token_ids, hf_tokenizer
    from verl.utils.device import get_device_name
    from verl.utils.model_folders import check_model_is_whole
    from verl.utils.safetensors_file import read_weights, shapes_in
    from verl.workers.engine.loading import DTYPES, load_hf_config
    from verl.workers.rollout.build import EngineRequest, build_rollout_engine, devices_per_engine

    device = torch.device(get_device_name())
    check_model_is_whole(folder)
    shapes = shapes_in(folder)
    model = Policy(path=str(folder))
    hf_config = load_hf_config({"path": str(folder)})
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ValueError(
            f"--model: found quantized weights at {folder}, which can't be replaced by a trainer's; expected "
            "those of the model that was trained (--quantization fp8 quantizes them), or serve them with "
            "vLLM's own server"
        )
    text_config = hf_config.get_text_config()
    if text_config.tie_word_embeddings:
        shapes.pop(TIED_HEAD, None)
    length = args.max_model_len or text_config.max_position_embeddings
    tokenizer = hf_tokenizer(str(folder))
    check_token_ids(tokenizer, text_config.vocab_size, str(folder))
    codec = ChatCodec(tokenizer, length, generation_eos_ids(str(folder)))
    dtype = DTYPES.get(args.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rollout = rollout_block(args, device)
    num_devices = devices_per_engine(rollout, model, device)
    request = EngineRequest(device, dtype, length, args.max_num_seqs, tensor_parallel_size=num_devices)
    engine = build_rollout_engine(rollout, model, request)
    engine.load_weights(read_weights(folder), 0)
    thread = EngineThread(engine, args.max_queue)
    return Sessions(thread, codec, args.max_sessions, args.session_seconds), shapes


def serve(
    args: argparse.Namespace,
    folder: Path,
    settings: dict[str, object],
    token: str | None,
    listener: socket.socket,
) -> int:
    """Load a model and serve it until the server is stopped, and return the exit status.

    Raises ValueError if the model can't be run.
    """
    import uvicorn

    from verl.inference.app import create_app
    from verl.sessions.engine_contract import EngineUnavailable
    from verl.utils.serving import SERVER_OPTIONS

    try:
        sessions, shapes = load(args, folder)
    except EngineUnavailable as error:
        raise ValueError(str(error)) from error

    def end() -> None:
        server.should_exit = True

    thread = sessions.engine
    thread.on_failure = end
    name = args.model_name or name_of(folder)
    app = create_app(sessions, name, shapes, token, args.host, settings)
    config = uvicorn.Config(app, timeout_graceful_shutdown=GRACE_SECONDS, **SERVER_OPTIONS)
    server = uvicorn.Server(config)
    sys.setswitchinterval(SWITCH_SECONDS)
    told = "".join(f" {key}={value}" for key, value in settings.items())
    address = f"http://{args.host}:{listener.getsockname()[1]}/v1"
    line = f"model {name} at {address}" + (f"; its run's settings:{told}" if told else "")
    print(printable(line), file=sys.stderr)
    server.run(sockets=[listener])
    return 0 if server.started and thread.ended_well else HAS_FAILED
