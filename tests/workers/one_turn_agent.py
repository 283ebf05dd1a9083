"""An agent that samples one turn, and its prompts: for tests of workers that generate."""

import torch

from verl.protocol import DataProto, object_array
from verl.sessions.engine_contract import SamplingParams

NEW_TOKENS = 9


class OneTurnAgent:
    """Samples one turn of NEW_TOKENS tokens for each prompt."""

    def __init__(self, tokenizer, engine):
        self.engine = engine
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def run_llm_loop(self, gen_batch):
        prompts = [list(ids) for ids in gen_batch.non_tensor_batch["raw_prompt_ids"]]
        row_of = {}
        for row, (prompt, seed) in enumerate(
            zip(prompts, gen_batch.batch["sampling_seeds"].tolist(), strict=True)
        ):
            row_of[self.engine.open(prompt, SamplingParams(NEW_TOKENS, seed=seed))] = row
        done = {}
        while len(done) < len(prompts):
            for completion in self.engine.step():
                done[row_of[completion.session_id]] = completion
                self.engine.close(completion.session_id)
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        input_ids = torch.tensor(
            [[0] * n + p + done[i].token_ids for i, (n, p) in enumerate(zip(padding, prompts, strict=True))]
        )
        attention = torch.tensor([[0] * n + [1] * (width - n + NEW_TOKENS) for n in padding])
        return DataProto.from_dict(
            {
                "input_ids": input_ids,
                "responses": input_ids[:, width:],
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "response_mask": torch.ones(len(prompts), NEW_TOKENS, dtype=torch.int64),
                "rollout_log_probs": torch.tensor([done[i].log_probs for i in range(len(prompts))]),
            }
        )


def gen_batch(num_rows=8):
    prompts = [[5 + row, 7, 9][: 1 + row % 3] for row in range(num_rows)]
    return DataProto.from_dict(
        {"sampling_seeds": torch.arange(num_rows)}, non_tensors={"raw_prompt_ids": object_array(prompts)}
    )
