"""A rollout process of its own: an engine and an agent, without a model that is trained.

    open_weight_channel (actor) -> join_weight_channel -> receive_weights -> generate_sequences

The engine is the one that would be colocated (native, vLLM, transformers), with the weights that the actor
sends (`weight_channel.py`). It keeps its memory between rollouts: nothing else is on its device.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import AutoTokenizer

from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, Worker, register
from verl.workers.fsdp_workers import Agent, AgentFactory, device_kind
from verl.workers.rollout.build import Request, build_engine
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.weight_channel import WeightReceiver, rollout_dtype


class RolloutWorker(Worker):
    """One rollout process.

    Args:
        config: the `actor_rollout_ref` block.
        agent_factory: (tokenizer, rollout engine) -> agent.
        device: "auto" (CUDA if there is one), "cpu" or "cuda".
    """

    def __init__(self, config: DictConfig, agent_factory: AgentFactory, device: str = "auto"):
        super().__init__()
        self.config, self.agent_factory = config, agent_factory
        # no process group: rollout processes have nothing to tell each other
        self.device = self.get_device(device_kind(device))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.agent: Agent | None = None
        self.rollout_engine: RolloutEngine | None = None
        self.receiver: WeightReceiver | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, num_rows: int) -> None:
        """Makes the agent and its engine for `num_rows` trajectories of this process.

        Raises:
            ValueError: the engine can't run this model, or not within its memory.
        """
        rollout, model = self.config.rollout, self.config.model
        tokenizer = AutoTokenizer.from_pretrained(
            str(Path(model.path).expanduser()), trust_remote_code=model.trust_remote_code
        )
        request = Request(
            self.device,
            rollout_dtype(self.config, self.device),
            rollout.prompt_length,
            num_rows,
            self.rank,
            self.world_size,
            copies_weights=True,
        )
        self.rollout_engine = build_engine(rollout, model, request)
        self.agent = self.agent_factory(tokenizer, self.rollout_engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_weight_channel(self, address: str, port: int) -> None:
        """Joins the group in which weights come, where the actor's rank 0 listens."""
        self.receiver = WeightReceiver(address, port, self.rank, self.world_size, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> None:
        """Takes the weights that the actor sends now, as of `version`."""
        assert self.rollout_engine is not None and self.receiver is not None
        stream = self.receiver.receive()
        try:
            self.rollout_engine.update_weights(stream, version)
        finally:
            for _ in stream:  # also after an error: the others of the group must not wait for this process
                pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Runs the agent on `raw_prompt_ids` with `sampling_seeds`; the result has a trajectory per row."""
        assert self.agent is not None
        with torch.no_grad():
            return self.agent.run_llm_loop(prompts)

    def close(self) -> None:
        with ExitStack() as ends:  # the last one named is called first, and each whatever the others raise
            ends.callback(super().close)
            if self.rollout_engine is not None:
                ends.callback(self.rollout_engine.shutdown)
            if self.agent is not None:
                ends.callback(self.agent.close)
