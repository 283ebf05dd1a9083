"""An environment that puts another conversation in place of the one so far: each context stands by itself."""

from __future__ import annotations

import pytest
import torch
from scripted_engine import byte_tokenizer, prompts
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.agent.agent import EnvironmentAgent
from verl.agent.trajectory import AgentConfig, Trajectory
from verl.environments.environment import BaseTextEnv
from verl.environments.executors import Environments
from verl.packing.packs import pack_rows
from verl.protocol import object_array
from verl.workers.rollout.native.native_engine import NativeEngine

CONFIG = AgentConfig(9, max_start_length=12, max_prompt_length=90, max_response_length=5, max_obs_length=20)
MAX_MODEL_LEN = 60


class Rewriting(BaseTextEnv):
    """Four turns; after the second it forgets all, and the third begins with a summary."""

    runs = "inline"
    counts_turns = reads_usage = True

    def step(self, action: str):
        self.turns += 1
        is_new = self.turns == 2
        content = f"So far {len(action)} characters.\n" if is_new else f"[{self.turns}]"
        said = [{"role": "user", "content": content}]
        return {
            "observations": said,
            "reward": 1.0,
            "done": self.turns == 4,
            "metadata": {"usage": self.usage},
            "is_new_context": is_new,
        }


@pytest.fixture(scope="module")
def generated():
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer)}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, initializer_range=0.4)).eval()
    engine = NativeEngine(model.config, 4, max_model_len=MAX_MODEL_LEN)
    engine.load_weights(model.state_dict().items(), version=3)
    batch = prompts(tokenizer, ["one\n", "two\n", "three\n"])
    episode = {"env_class": f"{__name__}:Rewriting", "prompt": [], "extras": {}}
    batch.non_tensor_batch["episode"] = object_array([episode] * 3)
    agent = EnvironmentAgent(tokenizer, engine, CONFIG, Environments())
    rows = agent.run_llm_loop(batch)
    agent.close()
    return model, rows


def contexts_of(rows, row: int) -> list[slice]:
    """Columns of input_ids of each context of a row."""
    record = rows.non_tensor_batch["trajectory"][row]
    width = rows.tensors["prompts"].shape[1]
    real = rows.tensors["attention_mask"][row].nonzero().squeeze(1)
    starts = [int(real[0]), *(width + start for start in record["contexts"])]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], int(real[-1]) + 1], strict=True)]


def test_each_token_is_sampled_from_its_own_context(generated):
    model, rows = generated
    for row in range(3):
        record = rows.non_tensor_batch["trajectory"][row]
        assert record["finish_reason"] in ("done", "length") and len(record["turns"]) == 4
        first, second = contexts_of(rows, row)
        assert second.start == rows.tensors["prompts"].shape[1] + record["turns"][1]["obs_start"]
        sampled = torch.cat([torch.zeros(CONFIG.max_start_length), rows.tensors["response_mask"][row]]).bool()
        found = torch.zeros(sampled.shape)
        found[CONFIG.max_start_length :] = rows.tensors["rollout_log_probs"][row]
        for context in (first, second):
            ids = rows.tensors["input_ids"][row, context]
            assert rows.tensors["position_ids"][row, context].tolist() == list(range(len(ids)))
            with torch.no_grad():
                scores = model(ids[None]).logits[0].log_softmax(-1)
            wanted = scores[:-1].gather(1, ids[1:, None]).squeeze(1)[sampled[context][1:]]
            assert len(wanted) and torch.allclose(found[context][sampled[context]], wanted, atol=1e-4)


def test_what_a_turn_has_read_is_its_own_context_and_what_is_left_counts_all(generated):
    _, rows = generated
    for row in range(3):
        record = rows.non_tensor_batch["trajectory"][row]
        width = rows.tensors["prompts"].shape[1]
        begins = [context.start - width for context in contexts_of(rows, row)]
        for number, turn in enumerate(record["turns"]):
            read, written, _ = turn["metadata"]["usage"]
            assert (read, written) == (turn["start"] - begins[number // 2], turn["end"] - turn["start"])
        assert record["room"] == MAX_MODEL_LEN - int(rows.tensors["attention_mask"][row].sum())


@pytest.mark.parametrize("padded", [False, True])
def test_contexts_of_a_row_are_packed_as_rows_of_their_own(generated, padded):
    _, rows = generated
    pack = pack_rows(rows.tensors, [0, 1, 2], "cpu", pad_to_longest=padded)
    lengths = [part.stop - part.start for row in range(3) for part in contexts_of(rows, row)]
    if padded:
        assert pack.packing.seq_lens == (max(lengths),) * 6
    else:
        assert pack.input_ids.shape[1] <= sum(lengths)
    sampled = rows.tensors["response_mask"].bool()
    assert pack.mask.equal(sampled)
    assert pack.unpack(pack.labels.float())[sampled].equal(rows.tensors["responses"][sampled].float())


def test_observations_can_be_learnt_but_for_what_nothing_predicts(generated):
    _, rows = generated
    mask = rows.tensors["response_mask"].bool()
    width = rows.tensors["responses"].shape[1]
    others = rows.tensors["attention_mask"][:, -width:].bool() & ~mask
    pack = pack_rows({**dict(rows.tensors.items()), "extra_loss_mask": others}, [0, 1, 2], "cpu")
    for row in range(3):
        others[row, rows.non_tensor_batch["trajectory"][row]["contexts"]] = False
    assert pack.mask.equal(mask) and pack.extra_mask.equal(others)


def test_a_context_that_is_kept_goes_on_where_it_was(generated):
    _, rows = generated
    record = rows.non_tensor_batch["trajectory"][0]
    state = {name: [] for name in ("response_ids", "response_mask", "log_probs")}
    state["response_ids"] = rows.tensors["responses"][0].tolist()[: record["turns"][-1]["end"]]
    made = Trajectory.continued(0, [7, 8], 0, {**state, "record": record})
    assert made.context == state["response_ids"][record["contexts"][0] :]
