"""LLMGenerationManager: from prompts to trajectories with searches in them, as a batch for training.

    DataProto (prompts, seeds) -> Trajectory per row -> TrajectoryLoop -> DataProto (tensors, records)

Lengths (tokens, as in Search-R1): a prompt keeps its last `max_start_length`, a turn samples at most
`max_response_length`, an observation has at most `max_obs_length`, a whole context `max_prompt_length`; what
can't go on within that ends with "length". After `max_turns` turns comes one last turn, whose search is not
made any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from search_r1.llm_agent.codec import Codec, GenerationConfig, generation_eos_ids
from search_r1.llm_agent.loop import Event, TrajectoryLoop
from search_r1.llm_agent.trajectory import Trajectory, search_metrics, to_tensors
from search_r1.search.client import SearchClient
from verl.config import Config
from verl.protocol import DataProto
from verl.workers.rollout.base import RolloutEngine, SamplingParams

__all__ = ["Event", "GenerationConfig", "LLMGenerationManager", "build_agent"]


class LLMGenerationManager:
    """Runs trajectories on one engine and one search client, which it owns; see the module's docstring."""

    def __init__(
        self,
        tokenizer: Any,
        engine: RolloutEngine,
        search_client: SearchClient | None,
        config: GenerationConfig,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Without a `search_client`, one is made for `config.search_url`; without `do_search` none is needed.
        `on_event` hears what happens as it happens; it needs an engine with `partial`.

        Raises ValueError for lengths that can't work, and for `do_search` without a client and an address.
        """
        if config.do_search and search_client is None:
            if config.search_url is None:
                raise ValueError(
                    "do_search: found true without a search client; expected a SearchClient, or search_url"
                )
            search_client = SearchClient(config.search_url, topk=config.topk)
        self.tokenizer, self.engine, self.config = tokenizer, engine, config
        self.search_client, self.on_event = search_client, on_event
        self.codec = Codec(tokenizer, config)

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto:
        """Generates one trajectory per row.

        Args:
            gen_batch: batch `sampling_seeds` [N] int64; non_tensor_batch `raw_prompt_ids` (list[int]), and if
                there are any `uid` (rows of one prompt, for `straggler_factor`) and `continuation` (None, or
                what `Trajectory.continued` takes); meta_info `do_sample` (False: greedy), `temperature`,
                `top_p`, `top_k`, `validate` (True: stragglers are waited for), `keep_partial` (True:
                stragglers end as "kept", with their mask as if they had ended), all optional.

        Returns:
            The tensors of generation in the table of `verl/protocol.py`, P = max_start_length and
            R = max_prompt_length (the same in every process, so that parts can be joined); the columns of
            gen_batch's non_tensor_batch but `continuation`, and `trajectory`: `Trajectory.record`. meta_info
            `metrics`: the `retrieval/*` and `rollout/*` (`engine_load.py`) figures of this process.
        """
        config, meta_info, columns = self.config, gen_batch.meta_info, gen_batch.non_tensor_batch
        seeds = gen_batch.tensors["sampling_seeds"].tolist()
        prompts = [[int(id_) for id_ in ids[-config.max_start_length :]] for ids in columns["raw_prompt_ids"]]
        trajectories = [
            Trajectory(row, prompt_ids, seed)
            if state is None
            else Trajectory.continued(row, prompt_ids, seed, state)
            for row, (prompt_ids, seed, state) in enumerate(
                zip(prompts, seeds, columns.get("continuation", [None] * len(seeds)), strict=True)
            )
        ]
        sampling: dict[str, Any] = {"temperature": 0.0}
        if meta_info.get("do_sample", True):
            names = ("temperature", "top_p", "top_k", "min_p")
            sampling = {name: meta_info.get(name, getattr(config, name)) for name in names}
        params = SamplingParams(
            max_tokens=config.max_response_length,
            stop=self.codec.stop,
            eos_token_ids=self.codec.eos_token_ids,
            ignore_eos=config.ignore_eos,
            **sampling,
        )
        groups = None if meta_info.get("validate", False) else columns.get("uid")
        before = {} if self.search_client is None else self.search_client.statistics()
        loop = TrajectoryLoop(
            self.codec,
            self.engine,
            self.search_client,
            config,
            params,
            trajectories,
            self.on_event,
            groups=None if groups is None else groups.tolist(),
            keep_partial=meta_info.get("keep_partial", False),
        )
        loop.run()
        tensors = to_tensors(
            trajectories,
            config.max_start_length,
            config.max_prompt_length,
            self.tokenizer.pad_token_id or 0,
        )
        records = [trajectory.record(self.codec.decode(trajectory.prompt_ids)) for trajectory in trajectories]
        non_tensors = {**columns, "trajectory": records}
        non_tensors.pop("continuation", None)
        after = {} if self.search_client is None else self.search_client.statistics()
        metrics = search_metrics(before, after, trajectories) | loop.load.metrics()
        return DataProto.from_dict(
            tensors=tensors, non_tensors=non_tensors, meta_info={"metrics": metrics} if metrics else {}
        )

    def close(self) -> None:
        """Ends the search client."""
        if self.search_client is not None:
            self.search_client.close()


def build_agent(
    config: Config, tokenizer: Any, engine: RolloutEngine, *, api_key: str | None = None
) -> LLMGenerationManager:
    """The agent of a training run from its whole configuration. `api_key`: of the retrieval servers.

    Raises ValueError for an address or a proxy that can't be used.
    """
    data, rollout, retriever = config.data, config.actor_rollout_ref.rollout, config.retriever
    generation = GenerationConfig(
        max_turns=config.max_turns,
        max_start_length=data.max_start_length,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_obs_length=data.max_obs_length,
        topk=retriever.topk,
        do_search=config.do_search,
        search_delay_steps=rollout.search_delay_steps,
        max_in_flight=rollout.max_in_flight,
        straggler_factor=rollout.straggler_factor,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        eos_token_ids=generation_eos_ids(config.actor_rollout_ref.model.path),
    )
    client = None
    if config.do_search:
        client = SearchClient(
            retriever.url,
            topk=retriever.topk,
            timeout=retriever.timeout,
            api_key=api_key,
            use_proxy=retriever.use_proxy,
        )
    return LLMGenerationManager(tokenizer, engine, client, generation)
