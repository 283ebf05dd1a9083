"""Trajectories of 1 to 8 turns with every column of a loss, and the rows of their turns made the plain way;
child processes import it.
"""

import torch
from algorithm_cases import PER_TOKEN, SPLITS, ActorFactory
from tiny_training import VOCABULARY

from verl.algos.aggregation import prompt_counts
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.batching import arrange_for_workers

NUM_ROWS = 11  # not even: with two processes one gets a copy that takes part in nothing
SELECTIVE = {"policy_loss__clip_cov_ratio": 0.2, "policy_loss__clip_cov_lb": -1.0}
# what is a sum over tokens, or over prompts, has the trajectory's gradient; `sequences` is divided by turns
EQUAL = {
    "vanilla": {},
    "several terms": {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3+", "echo_coeff": 0.3},
    "token-sum": {"loss_agg_mode": "token-sum", "policy_loss__loss_mode": "cispo"},
    "prompt-mean": {"loss_agg_mode": "prompt-mean"},
    "clip_cov": {"policy_loss__loss_mode": "clip_cov", **SELECTIVE},
    "idle rows": {"entropy_coeff": 0.0},
}
BY_TURN = {
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "gspo": {"policy_loss__loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "geo_mean": {"policy_loss__loss_mode": "geo_mean", "loss_agg_mode": "seq-mean-token-mean"},
}


def trajectories(num_rows=NUM_ROWS, seed=0) -> DataProto:
    """Rows of 1 to 8 turns in groups of 3, row i with 1 + i % 8; between turns observations of 1 to 4 tokens,
    and one behind the last turn of every third row. Those of a group begin with equal tokens. Row 3 sampled
    nothing, row 4 has no advantage, and rejection took the first tokens of row 5's second turn.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    prompt_width = 5
    width = 60
    tensors = {
        "attention_mask": torch.zeros(num_rows, prompt_width + width, dtype=torch.int64),
        "response_mask": torch.zeros(num_rows, width, dtype=torch.int64),
        "turn_ids": torch.full((num_rows, width), -1),
    }
    for row in range(num_rows):
        end = 0
        for turn in range(1 + row % 8):
            start = end
            end = end + number(1, 4)
            tensors["response_mask"][row, start:end] = 1
            tensors["turn_ids"][row, start:end] = turn
            end += number(1, 4) if turn < row % 8 or row % 3 == 0 else 0
        tensors["attention_mask"][row, prompt_width - number(1, 5) : prompt_width + end] = 1
    mask = tensors["response_mask"]
    attention = tensors["attention_mask"]
    second = (tensors["turn_ids"][5] == 1).nonzero().flatten()
    mask[5, second[: max(1, len(second) - 1)]] = 0
    mask[3] = 0
    ids = torch.randint(2, VOCABULARY, attention.shape, generator=generator)
    for row in range(num_rows):
        ids[row, : prompt_width + 6] = ids[row // 3 * 3, : prompt_width + 6]
    attention[:, :prompt_width] = attention[torch.arange(num_rows) // 3 * 3, :prompt_width]
    tensors["input_ids"] = ids * attention
    tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    tensors["observation_mask"] = attention[:, prompt_width:] * (tensors["turn_ids"] < 0)
    for name in PER_TOKEN:
        offset = {"advantages": 0.0, "rollout_is_weights": 1.0}.get(name, -3.7)
        tensors[name] = (torch.randn(mask.shape, generator=generator) * 0.3 + offset) * mask
    tensors["advantages"][4] = 0.0
    tensors["rollout_is_weights"].abs_()
    uids = [f"step1-{row // 3}" for row in range(num_rows)]
    tensors["prompt_tokens"], tensors["prompt_rows"] = prompt_counts(mask, uids)
    meta = {"bypass_mode": True, "num_mini_batches": 1}  # old_log_probs count at once
    return DataProto.from_dict(tensors, {"uid": object_array(uids)}, meta)


def whole(batch: DataProto) -> DataProto:
    """The same batch with trajectories as rows."""
    batch = batch.select()
    del batch.tensors["turn_ids"]
    return batch


def turns_as_trajectories(batch: DataProto) -> DataProto:
    """A row for each turn, of the trajectories' width: the tokens up to the turn's end, its mask alone."""
    tensors = batch.tensors
    rows = []
    width = tensors["response_mask"].shape[1]
    for row, turns in enumerate(tensors["turn_ids"].tolist()):
        for turn in range(max(turns) + 1):
            own = torch.tensor([number == turn for number in turns])
            last = max(column for column, number in enumerate(turns) if number == turn)
            copy = {name: column[row].clone() for name, column in whole(batch).tensors.items()}
            copy["response_mask"] *= own
            copy["attention_mask"][-width:][last + 1 :] = 0
            rows.append(copy)
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return DataProto.from_dict(columns, None, batch.meta_info)


def rows_of_rank(rank, world_size) -> DataProto:
    arranged, _ = arrange_for_workers(trajectories(), world_size, 1)
    arranged.meta_info["num_mini_batches"] = 1
    return arranged.chunk(world_size)[rank]


def updates(model_path, rank, world_size, of=lambda batch: batch):
    """case -> (metrics, gradient)."""
    factory = ActorFactory(model_path, world_size)
    return {
        case: factory.update(of(rows_of_rank(rank, world_size)), SPLITS["60 tokens"], **settings)
        for case, settings in (EQUAL | BY_TURN).items()
    }


def rank_main(rank, world_size, model_path, out):
    results = [updates(model_path, rank, world_size, of) for of in (lambda batch: batch, whole)]
    torch.save(results, out / f"rank{rank}.pt")
