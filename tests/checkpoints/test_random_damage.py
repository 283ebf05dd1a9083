"""Rule 15: of 300 random flips, cuts and deletions each is named or harmless, and none is silent.

The damage is done to every file of a checkpoint, of an index and of a remote store. Harmless means that what
is loaded is what was written.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from search_r1.search.bm25 import build_index
from search_r1.search.corpus import Corpus
from search_r1.search.launch import build_server_parser, open_retriever
from search_r1.search.manifest import Manifest, write_manifest
from verl.checkpoints import remote_store
from verl.checkpoints.remote_store import RemoteFailed, RemoteStore
from verl.checkpoints.run_state import CheckpointStore, RunState
from verl.protocol import DataProto
from verl.trainer.ppo.saved_rows import save_rows
from verl.utils.file_sums import SUMS_FILE, files_below
from verl.workers.engine.checkpoint import save_progress, save_tensors, tensor_names, write_hf_folder
from verl.workers.engine.loading import load_policy

STEPS = (2, 4)
NUM_DAMAGES = 100  # of each of the three stores
QUERIES = ("director river", "word3 word5", "amber harbor", "word11 film town", "zebra")


def write_checkpoint(store: CheckpointStore, step: int, policy, base: Path) -> None:
    """Write a checkpoint with the functions of a run."""
    folder = store.begin(step)
    actor = folder / "actor"
    actor.mkdir()
    weights = {name: tensor.detach() * step for name, tensor in policy.state_dict().items()}
    optimizer = {"state": {name: torch.rand_like(tensor) for name, tensor in weights.items()}}
    save_tensors({"model": weights, "optimizer": optimizer}, actor / "dcp")
    parameter = torch.nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([parameter]), lambda update: 1.0)
    save_progress(actor, scheduler, step, torch.device("cpu"), 0)
    write_hf_folder(policy.model, tensor_names(policy.model), actor / "huggingface", None, base, actor)
    rows = DataProto.from_dict({"responses": torch.arange(12).reshape(3, 4)}, {"uid": ["a", "b", "c"]})
    save_rows(folder / "rollout_stream.npz", {"ready": [rows], "next_number": 5})
    np.savez(folder / "prompt_history.npz", drawn=np.arange(50))
    RunState(step=step, generated_tokens=1000).save(folder)
    (folder / "learning_settings.json").write_text('{"values": {"a": 1}, "contents": {}}')
    store.commit(step)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run with two checkpoints of a small model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    base = tmp_path_factory.mktemp("base")
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(base)
    policy = load_policy({"path": str(base)}, torch.float32)
    folder = tmp_path_factory.mktemp("written") / "run"
    store = CheckpointStore(folder, None)
    for step in STEPS:
        write_checkpoint(store, step, policy, base)
    (folder / "metrics.jsonl").write_text('{"step": 2, "train/em": 0.5}\n{"step": 4, "train/em": 0.25}\n')
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "step_4.jsonl").write_text('{"text": "a"}\n')
    return folder


@pytest.fixture(scope="module")
def remote(tmp_path_factory, run) -> Path:
    """A remote place with the run."""
    place = tmp_path_factory.mktemp("far")
    store = RemoteStore(f"file://{place}", "run")
    store.check(run)
    for step in STEPS:
        store.upload(step, run / f"global_step_{step}", run)
    return place


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """A folder with a corpus, its offsets, and an index of it."""
    folder = tmp_path_factory.mktemp("searched")
    texts = [" ".join(f"word{(row * 7 + k) % 40}" for k in range(12)) for row in range(300)]
    texts += ["Amber Harbor is a film by a director", "a town on a river"]
    lines = "".join(f'{{"id": "{row}", "contents": "{text}"}}\n' for row, text in enumerate(texts))
    (folder / "corpus.jsonl").write_text(lines)
    corpus = Corpus.open(folder / "corpus.jsonl")
    (folder / "bm25").mkdir()
    parameters = build_index(corpus, folder / "bm25", lambda *_: None)
    facts = corpus.fingerprint() | {"sha256": corpus.sha256(), "name": "corpus.jsonl"}
    write_manifest(folder / "bm25", Manifest("bm25", facts, parameters, {}))
    return folder


def do_damage(rng: random.Random, root: Path) -> tuple[str, str]:
    """Flip a bit of a random file below a folder, cut it or delete it; return its name and what was done."""
    name = rng.choice(list(files_below(root)))
    path = root / name
    content = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "flip", "cut", "delete"))
    if kind == "delete" or not content:
        path.unlink()
        return name, "delete"
    if kind == "cut":
        del content[rng.randrange(len(content)) :]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return name, kind


def same_files(folder: Path, original: Path) -> bool:
    """Return whether a checkpoint has all files that were written, but for its sums."""
    return all(
        (folder / name).is_file() and (folder / name).read_bytes() == (original / name).read_bytes()
        for name in files_below(original)
        if name != SUMS_FILE
    )


def test_rule_15_random_damage_to_a_checkpoint_is_named_or_harmless(tmp_path, run, capsys):
    counts = {"named": 0, "harmless": 0}
    for seed in range(NUM_DAMAGES):
        folder = tmp_path / str(seed)
        shutil.copytree(run, folder)
        name, kind = do_damage(random.Random(seed), folder / "global_step_4")
        store = CheckpointStore(folder, None)
        found = store.find_whole("auto", None)
        printed = capsys.readouterr().out
        assert found is not None and same_files(found, run / found.name), (seed, name, kind)
        assert found.name == "global_step_4" or name in printed, (seed, name, kind, printed)
        counts["named" if printed else "harmless"] += 1
        shutil.rmtree(folder)
    assert counts["named"] > 0.9 * NUM_DAMAGES, counts


def test_rule_15_random_damage_to_a_remote_store_is_named_or_harmless(
    tmp_path, run, remote, capsys, monkeypatch
):
    monkeypatch.setattr(remote_store, "sync_tree", lambda folder: None)  # takes most of the time
    for seed in range(NUM_DAMAGES):
        place = tmp_path / f"far{seed}"
        shutil.copytree(remote, place)
        name, kind = do_damage(random.Random(1000 + seed), place / "run")
        store = CheckpointStore(tmp_path / f"here{seed}" / "run", None, RemoteStore(f"file://{place}", "run"))
        assert store.remote is not None
        try:
            store.remote.check(store.run_dir)
            found = store.find_whole("auto", None)
        except RemoteFailed as error:
            assert Path(name).name in str(error), (seed, name, kind, error)
            continue
        printed = capsys.readouterr().out
        is_of_the_older = name.startswith("global_step_2/")
        assert found is not None and same_files(found, run / found.name), (seed, name, kind)
        step_is_named = Path(name).name in printed and "step" in printed
        assert found.name == "global_step_4" or step_is_named, (seed, name, kind, printed)
        for record in ("metrics.jsonl", "trajectories/step_4.jsonl"):
            here = store.run_dir / record
            is_same = here.is_file() and here.read_bytes() == (run / record).read_bytes()
            assert is_same or record in printed, (seed, name, kind, printed)
        assert not is_of_the_older or found.name == "global_step_4"
        shutil.rmtree(place)
        shutil.rmtree(store.run_dir.parent)


def test_rule_15_random_damage_to_an_index_is_named_or_harmless(tmp_path, index, capsys):
    def answers(folder: Path, lines: list[str]) -> object:
        words = ["--corpus_path", str(folder / "corpus.jsonl"), "--index_path", str(folder / "bm25")]
        served = open_retriever(build_server_parser().parse_args(words), lines.append)
        try:
            documents, scores = served.batch_search(list(QUERIES), 5)
            return [[(d.row, d.json) for d in found] for found in documents], scores
        finally:
            served.close()

    expected = answers(index, [])
    for seed in range(NUM_DAMAGES):
        folder = tmp_path / str(seed)
        shutil.copytree(index, folder)
        rng = random.Random(2000 + seed)
        damaged = folder / "bm25"
        if seed % 10 == 0:
            damaged = folder  # the offsets of the corpus, and the corpus itself, too
        name, kind = do_damage(rng, damaged)
        lines: list[str] = []
        try:
            actual = answers(folder, lines)
        except ValueError as error:
            is_named = Path(name).name in str(error) or "--index_path" in str(error) or "corpus" in str(error)
            assert is_named and str(folder) in str(error), (seed, name, kind, error)
        else:
            said = any("can't be told" in line for line in lines) or capsys.readouterr().err
            assert actual == expected or said, (seed, name, kind)
        shutil.rmtree(folder)
