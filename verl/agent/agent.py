"""From prompts to trajectories, as a batch for training, with any environments: `EnvironmentAgent`.

gen_batch (prompts, seeds) -> Trajectory of each row -> TrajectoryLoop -> tensors and records
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.agent.codec import Codec, to_tensors
from verl.agent.loop import LoopEvent, TrajectoryLoop
from verl.agent.trajectory import AgentConfig, Trajectory
from verl.environments.base import row_max_turns
from verl.environments.executors import Environments
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import cut_prompt
from verl.workers.rollout.base import RolloutEngine, SamplingParams


class EnvironmentAgent:
    """Runs trajectories on one engine, in the environments that their rows name."""

    def __init__(
        self,
        tokenizer: Any,
        engine: RolloutEngine,
        config: AgentConfig,
        environments: Environments,
        on_event: Callable[[LoopEvent], None] | None = None,
    ) -> None:
        """environments: which it owns. `on_event` hears what happens as it happens; it needs an engine with
        `partial`.
        """
        self.tokenizer = tokenizer
        self.engine = engine
        self.config = config
        self.environments = environments
        self.on_event = on_event
        self.codec = Codec(tokenizer, config, environments.block.observation_format)

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto:
        """Generates one trajectory per row.

        Args:
            gen_batch: batch `sampling_seeds` [N] int64; non_tensor_batch `raw_prompt_ids` (list[int]), and if
                there are any `uid` (rows of one prompt, for `straggler_factor`), `continuation` (None, or
                what `Trajectory.continued` takes) and `episode` (None: a search; or its `env_class`, `prompt`
                (messages) and `extras`); meta_info `do_sample` (False: greedy), `temperature`,
                `top_p`, `top_k`, `validate` (True: stragglers are waited for), `keep_partial` (True:
                stragglers end as "kept", with their mask as if they had ended), all optional.

        Returns:
            The tensors of generation in the table of `verl/protocol.py`, P = max_start_length and
            R = max_prompt_length, which bounds prompt and response together (P and R are the same in every
            process, so that parts can be joined); gen_batch's columns but `continuation`, and `trajectory`:
            `Trajectory.record`. meta_info `metrics`: `rollout/*` figures of this process and `figures`.
        """
        columns = gen_batch.non_tensor_batch
        meta_info = gen_batch.meta_info
        trajectories = self.trajectories(gen_batch)
        groups = columns["uid"].tolist() if "uid" in columns and not meta_info.get("validate") else None
        params = self.sampling_params(meta_info)
        keeps = meta_info.get("keep_partial", False)
        loop = TrajectoryLoop(self, params, trajectories, groups=groups, keep_partial=keeps)
        loop.run()
        return self.batch(trajectories, columns, self.figures(trajectories) | loop.load.metrics())

    def trajectories(self, gen_batch: DataProto) -> list[Trajectory]:
        """Those of a batch's rows, to be begun or gone on with."""
        config = self.config
        columns = gen_batch.non_tensor_batch
        seeds = gen_batch.tensors["sampling_seeds"].tolist()
        longest = config.max_start_length
        asked = columns["raw_prompt_ids"]
        prompts = [cut_prompt(self.tokenizer, list(map(int, ids)), longest) for ids in asked]
        nothing: list[Any] = [None] * len(seeds)
        states = columns.get("continuation", nothing)
        episodes = columns.get("episode", nothing)
        trajectories = []
        for row, (ids, seed, state) in enumerate(zip(prompts, seeds, states, strict=True)):
            is_new = state is None
            made = Trajectory(row, ids, seed) if is_new else Trajectory.continued(row, ids, seed, state)
            if (episode := episodes[row]) is not None:
                made.env_class = episode["env_class"]
                made.messages = episode["prompt"]
                made.extras = episode["extras"]
            made.max_turns = row_max_turns(made.extras) or config.max_turns
            trajectories.append(made)
        return trajectories

    def sampling_params(self, meta_info: Mapping[str, Any]) -> SamplingParams:
        """How a batch with this meta_info is sampled."""
        config = self.config
        sampling: dict[str, Any] = {"temperature": 0.0}
        if meta_info.get("do_sample", True):
            names = ("temperature", "top_p", "top_k", "min_p")
            sampling = {name: meta_info.get(name, getattr(config, name)) for name in names}
        return SamplingParams(config.max_response_length, eos_token_ids=self.codec.eos_token_ids, **sampling)

    def batch(
        self, trajectories: Sequence[Trajectory], columns: Mapping[str, Any], metrics: dict[str, float]
    ) -> DataProto:
        """What `run_llm_loop` returns of trajectories that have ended; columns: of their rows."""
        config = self.config
        pad = self.tokenizer.pad_token_id or 0
        tensors = to_tensors(trajectories, config.max_start_length, config.max_prompt_length, pad)
        records = [each.record(self.codec.decode_prompt(tuple(each.prompt_ids))) for each in trajectories]
        non_tensors = {**columns, "trajectory": records}
        non_tensors.pop("continuation", None)
        return DataProto.from_dict(tensors, non_tensors, {"metrics": metrics} if metrics else {})

    def figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """More metrics of a batch; for subclasses."""
        return {}

    def close(self) -> None:
        """Ends the environments' threads and processes."""
        self.environments.close()
