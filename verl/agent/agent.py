"""The agent that turns prompts into trajectories, as a batch for training, in any environments.

gen_batch (prompts, seeds) -> Episode of each row -> TrajectoryLoop -> Trajectory of each -> tensors, records
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.agent.codec import Codec, to_tensors
from verl.agent.episode import Episode
from verl.agent.loop import LoopEvent, TrajectoryLoop
from verl.agent.trajectory import AgentConfig, Trajectory
from verl.data.rl_dataset import cut_prompt
from verl.environments.executors import Environments
from verl.protocol import DataProto
from verl.sessions.engine_contract import RolloutEngine, SamplingParams
from verl.utils.rows import row_max_turns


class EnvironmentAgent:
    """The agent that runs trajectories on one engine, in the environments that their rows name."""

    def __init__(
        self,
        tokenizer: Any,
        engine: RolloutEngine,
        config: AgentConfig,
        environments: Environments,
        on_event: Callable[[LoopEvent], None] | None = None,
    ) -> None:
        """Create an agent.

        Args:
            tokenizer: The tokenizer of the policy.
            engine: The engine that samples the turns.
            config: Lengths, limits and sampling of the trajectories.
            environments: The environments of this process. The agent owns them and closes them.
            on_event: Called with each `LoopEvent` as it happens. It needs an engine with `partial`.
        """
        self.tokenizer = tokenizer
        self.engine = engine
        self.config = config
        self.environments = environments
        self.on_event = on_event
        self.codec = Codec(tokenizer, config, environments.block.observation_format)

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto:
        """Generate one trajectory per row.

        Args:
            gen_batch: The prompts, with these columns and settings.

                - batch: `sampling_seeds` [N] int64.
                - non_tensor_batch: `raw_prompt_ids` (list[int]) and, optionally, `uid` (the same for all rows
                  of one prompt, for `straggler_factor`), `continuation` (None, or the state that
                  `Trajectory.continued` takes) and `episode` (None for a search, or a mapping with
                  `env_class`, `prompt` (messages) and `extras`).
                - meta_info, all optional: `do_sample` (False means greedy), `temperature`, `top_p`, `top_k`,
                  `min_p` and `validate` (True means that the batch waits for stragglers).

        Returns:
            A batch with the tensors of generation in the table of `verl/protocol.py`. P is `max_start_length`
            and R is `max_prompt_length`, which bounds prompt and response together. P and R are the same in
            every process, so that the parts of a batch can be joined. The non-tensor columns are those of
            gen_batch without `continuation`, and `trajectory`, which holds each `Trajectory.record`. The
            `metrics` in meta_info are the `rollout/*` figures of this process and those of `figures`.
        """
        columns = gen_batch.non_tensor_batch
        meta_info = gen_batch.meta_info
        episodes = self.episodes(gen_batch)
        groups = columns["uid"].tolist() if "uid" in columns and not meta_info.get("validate") else None
        params = self.sampling_params(meta_info)
        loop = TrajectoryLoop(self, params, episodes, groups=groups)
        loop.run()
        trajectories = [episode.trajectory for episode in episodes]
        metrics = self.figures(trajectories) | loop.engine_load.metrics()
        return self.batch(trajectories, columns, metrics)

    def episodes(
        self,
        gen_batch: DataProto,
        rows: Sequence[int] | None = None,
        params: SamplingParams | None = None,
    ) -> list[Episode]:
        """Make the episodes of a batch's rows. Their trajectories are new ones or continued ones.

        Args:
            gen_batch: The batch, as `run_llm_loop` takes it.
            rows: The `Trajectory.row` of each. None means that they are numbered from 0.
            params: The sampling of their turns. None means that of the loop.
        """
        config = self.config
        columns = gen_batch.non_tensor_batch
        seeds = gen_batch.tensors["sampling_seeds"].tolist()
        max_length = config.max_start_length
        all_ids = columns["raw_prompt_ids"]
        prompts = [cut_prompt(self.tokenizer, list(map(int, ids)), max_length) for ids in all_ids]
        absent: list[Any] = [None] * len(seeds)
        states = columns.get("continuation", absent)
        environments = columns.get("episode", absent)
        if rows is None:
            rows = range(len(seeds))
        episodes = []
        for row, ids, seed, state, environment in zip(
            rows, prompts, seeds, states, environments, strict=True
        ):
            is_new = state is None
            trajectory = Trajectory(row, ids, seed) if is_new else Trajectory.continued(row, ids, seed, state)
            episode = Episode(trajectory, config.max_turns, params=params)
            if environment is not None:
                trajectory.env_class = environment["env_class"]
                episode.messages = environment["prompt"]
                episode.extras = environment["extras"]
                episode.max_turns = row_max_turns(episode.extras) or config.max_turns
            episodes.append(episode)
        return episodes

    def sampling_params(self, meta_info: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a batch with this meta_info."""
        config = self.config
        sampling: dict[str, Any] = {"temperature": 0.0}
        if meta_info.get("do_sample", True):
            names = ("temperature", "top_p", "top_k", "min_p")
            sampling = {name: meta_info.get(name, getattr(config, name)) for name in names}
        return SamplingParams(config.max_response_length, eos_token_ids=self.codec.eos_token_ids, **sampling)

    def batch(
        self,
        trajectories: Sequence[Trajectory],
        columns: Mapping[str, Any],
        metrics: dict[str, float],
    ) -> DataProto:
        """Build the batch that `run_llm_loop` returns.

        Args:
            trajectories: The trajectories, which have ended or are copies for a checkpoint.
            columns: The non-tensor columns of their rows.
            metrics: Figures for meta_info.
        """
        config = self.config
        pad = self.tokenizer.pad_token_id or 0
        tensors = to_tensors(trajectories, config.max_start_length, config.max_prompt_length, pad)
        records = [
            trajectory.record(self.codec.decode_prompt(tuple(trajectory.prompt_ids)))
            for trajectory in trajectories
        ]
        non_tensors = {**columns, "trajectory": records}
        non_tensors.pop("continuation", None)
        return DataProto.from_dict(tensors, non_tensors, {"metrics": metrics} if metrics else {})

    def figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return more metrics of a batch. Subclasses override it."""
        return {}

    def close(self) -> None:
        """End the environments' threads and processes."""
        self.environments.close()
