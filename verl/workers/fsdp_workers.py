"""The workers of a training job: policy, rollout and reference in one process, and the critic.

    generate_sequences -> compute_log_prob, compute_ref_log_prob -> update_actor      (ActorRolloutRefWorker)
                          compute_values -> update_critic                             (CriticWorker)

`sync_weights` gives the policy's weights to the rollout engine. On CUDA the native one reads them where they
are (one process, same dtype), and an update needs no copy; on CPU it packs a copy of them after each update.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.config.policy import Actor, ActorRolloutRef, Megatron
from verl.config.schema import Critic
from verl.protocol import DataProto
from verl.single_controller.base import DataPosition, Dispatch, Worker, register
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn
from verl.utils.device import free_large_tensors_at_once
from verl.workers.actor.dp_actor import DataParallelPPOActor, compute_log_prob, token_statistics
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.base import Engine
from verl.workers.engine.fsdp_engine import TrainEngine
from verl.workers.engine.loading import Precision, check_heads, load_policy, load_value_model
from verl.workers.engine.reference import Reference
from verl.workers.engine.snapshot import BackgroundWriter
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.rollout import build
from verl.workers.rollout.base import RolloutEngine

STATE_FILE = "update.json"
ROLES = ("actor", "actor_rollout", "actor_rollout_ref")


class Agent(Protocol):
    """What turns prompts into trajectories with a rollout engine."""

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto: ...

    def close(self) -> None: ...


AgentFactory = Callable[[PreTrainedTokenizerBase, RolloutEngine], Agent]


def device_kind(device: str) -> str:
    """ "cpu" or "cuda" for a configured device; auto: what is there."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: found {device!r}, expected auto, cpu or cuda.")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


class TrainingWorker(Worker):
    """One rank that trains a model and writes its checkpoints.

    config: a block with `model`. device: "auto" (CUDA if there is one), "cpu" or "cuda". block: that of the
    model's update, which says how many processes share each micro-batch's tokens (None: no others).
    """

    config: Any
    engine: Engine
    tokenizer: Any = None  # of a policy, saved with it
    updater: DataParallelPPOActor | DataParallelPPOCritic | None = None  # what else checkpoints have

    def __init__(self, config: Any, device: str, block: Actor | Critic | None = None) -> None:
        super().__init__()
        self.config = config
        self.device = self.init_process_group(device_kind(device))
        if self.device.type == "cpu":
            free_large_tensors_at_once()
        self.checkpoint_writer = BackgroundWriter()
        self.num_sharing = 1 if block is None else self.processes_sharing(block)

    def processes_sharing(self, block: Actor | Critic) -> int:
        return int(block.ulysses_sequence_parallel_size)

    def build_engine(
        self,
        model: Mapping[str, Any],
        fsdp_config: Mapping[str, Any],
        megatron: Megatron | None = None,
        optim: Mapping[str, Any] | None = None,
        grad_clip: float = 1.0,
        is_policy: bool = True,
        adapted: bool = True,
    ) -> Engine:
        """An engine of a policy, or else of a value model; without `optim` a frozen one. The first four are
        blocks of the configuration. adapted: with the LoRA adapters that `model` asks for.
        """
        check_heads(model, self.num_sharing)
        precision = Precision.from_config(fsdp_config, self.device, trained=optim is not None)
        whole = self.world_size == 1  # else each reads its own part
        return TrainEngine(
            load_policy(model, precision.model, adapted, whole)
            if is_policy
            else load_value_model(model, precision.model, whole),
            precision,
            fsdp_config,
            self.device,
            self.world_size,
            optim,
            grad_clip,
            self.num_sharing,
        )

    def limits(self, block: Mapping[str, Any], prefix: str) -> MicroBatchLimits:
        packed = self.config.model.use_remove_padding
        return MicroBatchLimits.from_config(block, prefix, self.device, packed, self.num_sharing)

    @register()
    def data_position(self) -> DataPosition:
        """Of the engine; known from init_model on."""
        return self.engine.data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """All that training goes on from, in `path`; a policy's weights as a Hugging Face folder in
        `path`/huggingface. background: the files may be incomplete until `checkpoint_is_written`.
        """
        folder = Path(path)
        source = self.config.model.path
        snapshots = [self.engine.snapshot(folder)]
        if self.tokenizer is not None:
            snapshots.append(self.engine.snapshot_hf(folder / "huggingface", self.tokenizer, source, folder))
        if self.updater is not None and self.rank == 0:
            (folder / STATE_FILE).write_text(json.dumps(self.updater.state_dict()))
        self.checkpoint_writer.write(snapshots, folder, background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_is_written(self, wait: bool) -> bool:
        """Whether nothing of the last checkpoint is being written any more. CheckpointFailed: it could not
        be written.
        """
        return self.checkpoint_writer.is_done(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Goes on from a folder of save_checkpoint, made with any number of processes."""
        self.engine.load(path)
        if self.updater is not None and self.engine.num_training_steps:  # else weights alone, to start with
            file = Path(path) / STATE_FILE
            if not file.is_file():
                found = f"Checkpoint {path} has no {STATE_FILE}"
                raise ValueError(f"{found}; expected a folder that a run saved.")
            self.updater.load_state_dict(json.loads(file.read_text()))

    def close(self) -> None:
        self.checkpoint_writer.close()
        super().close()


class ActorRolloutRefWorker(TrainingWorker):
    """One rank of the policy: trains it, samples from it, and holds a frozen copy of its start as reference.

    config: the `actor_rollout_ref` block. role: "actor_rollout_ref"; without a reference "actor_rollout" or
    "actor". agent_factory: (tokenizer, rollout engine) -> agent; needed for generate_sequences. seed: of the
    order of mini-batches with actor.shuffle.
    """

    streams_parameters = True  # a single process's weight stream is of its parameters, not of copies

    def __init__(
        self,
        config: ActorRolloutRef,
        role: str,
        agent_factory: AgentFactory | None = None,
        device: str = "auto",
        seed: int = 0,
    ):
        if role not in ROLES:
            raise ValueError(f"role: found {role!r}, expected one of {', '.join(ROLES)}.")
        super().__init__(config, device, config.actor)
        self.agent_factory = agent_factory
        self.seed = seed
        self.has_ref = role.endswith("ref")
        self.agent: Agent | None = None
        self.rollout_engine: RolloutEngine | None = None
        self._rollout_weights_stale = False
        self._weight_writer: Any = None
        # processes that sample from one model
        rollout = config.rollout
        self.sampling_together = 1
        if rollout.placement == "colocated" and build.engine_name(rollout, self.device) == "vllm":
            per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.sampling_together = build.model_parallel_size(rollout, config.model, per_node)
        replica, place = divmod(self.rank, self.sampling_together)
        self._register_dispatch_collect_info("rollout", replica, place == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the models. Raises ValueError for a model folder that is missing or does not fit."""
        config = self.config
        actor = self.config.actor
        ref = self.config.ref
        self.tokenizer = AutoTokenizer.from_pretrained(
            str(Path(config.model.path).expanduser()), trust_remote_code=config.model.trust_remote_code
        )
        fsdp = actor.fsdp_config
        megatron = actor.megatron
        self.engine = self.build_engine(config.model, fsdp, megatron, actor.optim, actor.grad_clip)
        limits = self.limits(actor, "ppo")
        temperature = config.rollout.temperature
        self.updater = self.actor = DataParallelPPOActor(
            actor, self.engine, limits, temperature, config.rollout.n, self.seed
        )
        if config.teacher.path is not None:
            self.teacher_engine = self._load_teacher()
        if self.has_ref:
            own = None
            if self.engine.adapters is None:
                own = self.build_engine(config.model, ref.fsdp_config, ref.megatron, adapted=False)
            self.reference = Reference(self.engine, own)

    def _load_teacher(self) -> Engine:
        """The frozen model that distillation learns from, on the reference's settings. ValueError: its folder
        does not fit, or its tokens are not the policy's.
        """
        model = self.config.model
        path = str(self.config.teacher.path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"actor_rollout_ref.teacher.path={path} has another vocabulary than "
                f"actor_rollout_ref.model.path={model.path}; expected a model with the same tokenizer."
            )
        source = {"path": path} | {key: model[key] for key in ("external_lib", "trust_remote_code")}
        ref = self.config.ref
        return self.build_engine(source, ref.fsdp_config, ref.megatron, adapted=False)

    # --------------------------------------------------------------------------------------------- rollout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, num_rows: int, taken: int | None = None) -> None:
        """Makes the agent and its engine, if there are none, for `num_rows` trajectories of this process and
        of those that share its model; taken as in `EngineRequest` (None: what is held now), errors as in
        `build_engine`.
        """
        if self.agent is not None:
            return
        if self.agent_factory is None:
            raise ValueError("generate_sequences needs a worker made with an agent_factory.")
        rollout = self.config.rollout
        if taken is None and self.device.type == "cuda":
            left, total = torch.cuda.mem_get_info(self.device)
            taken = total - left
        dtype = build.rollout_dtype(rollout, self.engine.precision.compute)
        request = build.EngineRequest(
            self.device,
            dtype,
            rollout.prompt_length,
            num_rows,
            self.rank,
            self.world_size,
            copies_weights=not self.streams_parameters
            or self.world_size > 1
            or dtype != self.engine.precision.model
            or self.engine.adapters is not None,
            taken=taken,
            sharing=self.sampling_together,
        )
        with self.engine.loaded():  # an engine that measures the free memory sees what it will have
            self.rollout_engine = build.build_engine(rollout, self.config.model, request)
        self.agent = self.agent_factory(self.tokenizer, self.rollout_engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> None:
        """Gives the policy's present weights to the rollout engine, which is awake from then on until
        generate_sequences or save_checkpoint has it sleep. To be called after an update.

        Does nothing while the engine has these weights, or isn't there yet: it takes them at its first
        generation. `generate_sequences` brings them where nobody has since the last update. It is also left
        to that with `param_offload`, so that the engine holds no device memory before it generates.
        """
        if self.config.rollout.placement == "apart" or not self.engine.offloads_params:
            self._bring_weights()

    def _bring_weights(self) -> None:
        rollout = self.rollout_engine
        version = self.engine.weights_version
        if rollout is None or (rollout.version == version and not self._rollout_weights_stale):
            return
        with self.engine.loaded(), torch.no_grad():
            rollout.wake()
            dtype = build.rollout_dtype(self.config.rollout, self.engine.precision.compute)
            rollout.load_weights(self.engine.weights(dtype), version)
        self._rollout_weights_stale = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_dtype(self) -> str:
        """Of the weights that rollouts take, a torch dtype's name."""
        dtype = build.rollout_dtype(self.config.rollout, self.engine.precision.compute)
        return str(dtype).removeprefix("torch.")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def export_weights(
        self, version: int = 0, folder: Path | None = None
    ) -> list[tuple[str, torch.Tensor]] | Path | None:
        """The policy's present weights for rollout processes: from rank 0 copies in CPU memory under Hugging
        Face names, in the rollouts' dtype; None from others. With a folder a thread writes them there as
        `version` (`WeightWriter`), once those of the call before are written, and rank 0 gives the folder.
        """
        dtype = getattr(torch, self.rollout_dtype())
        weights = []
        with self.engine.loaded(), torch.no_grad():
            for name, tensor in self.engine.weights(dtype):
                if self.rank == 0:
                    weights.append((name, tensor.detach().to("cpu", copy=True)))
        if folder is None or self.rank != 0:
            return weights if self.rank == 0 else None
        if self._weight_writer is None:
            from verl.utils.weight_files import WeightWriter

            rollout = self.config.rollout
            readers = [f"rollout-{rank}" for rank in range(rollout.num_processes)]
            anchor_every = rollout.anchor_every if rollout.weight_transfer == "delta" else 1
            self._weight_writer = WeightWriter(folder, anchor_every, readers)
        self._weight_writer.begin(weights, version)
        return folder

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Runs the agent on `raw_prompt_ids` with `sampling_seeds`; the result has a trajectory per row.
        Processes that sample from one model get the same rows; what the first of them returns counts.
        """
        self.start_rollout(len(prompts))
        agent = self.agent
        engine = self.rollout_engine
        assert agent is not None and engine is not None
        with ExitStack() as policy_on_device, torch.no_grad():
            if build.engine_name(self.config.rollout, self.device) == "native":  # reads the policy's weights
                policy_on_device.enter_context(self.engine.loaded())
            self._bring_weights()
            engine.wake()
            with engine.leading() as leads:
                result = agent.run_llm_loop(prompts) if leads else DataProto()
            self._sleep(engine)
        return result

    def _sleep(self, engine: RolloutEngine) -> None:
        """Gives the engine's memory on this device to the trainer, until the next generation."""
        rollout = self.config.rollout
        if rollout.placement == "apart" or not (rollout.free_cache_engine or self.engine.offloads_params):
            return
        # vLLM would keep weights in the node's memory that the next update replaces; the native engine's are
        # the trainer's own, unless those are to be freed
        is_vllm = build.engine_name(rollout, self.device) == "vllm" and self.device.type == "cuda"
        level = 2 if self.engine.offloads_params or is_vllm else 1
        engine.sleep(level)
        self._rollout_weights_stale = self._rollout_weights_stale or level == 2

    def close(self) -> None:
        with ExitStack() as ends:  # the last one named is called first, and each whatever the others raise
            ends.callback(super().close)
            if self.rollout_engine is not None:
                ends.callback(self.rollout_engine.shutdown)
            if self.agent is not None:
                ends.callback(self.agent.close)
            if self._weight_writer is not None:
                ends.callback(self._weight_writer.close)
            ends.callback(self.checkpoint_writer.close)  # while there are the groups that it writes with

    # ------------------------------------------------------------------------------- log-probs and the update

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """old_log_probs [N, R] of the present policy; with meta_info `calculate_entropy` entropys, and with
        `calculate_sum_pi_squared` sum_pi_squared besides; see `token_statistics`.
        """
        limits = self.limits(self.config.rollout, "log_prob")
        options = [data.meta_info.get(f"calculate_{name}", False) for name in ("entropy", "sum_pi_squared")]
        results = token_statistics(self.engine, data, limits, self.config.rollout.temperature, *options)
        return DataProto.from_dict({"old_log_probs": results.pop("log_probs"), **results})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob [N, R] of the model that training started from, or of the policy at the last
        reset_reference.
        """
        limits = self.limits(self.config.ref, "log_prob")
        with self.reference.active() as engine:
            log_probs = compute_log_prob(engine, data, limits, self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset_reference(self) -> None:
        """From now on the reference is the present policy; part of checkpoints from then on."""
        self.reference.reset()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """teacher_log_prob [N, R] of the model at teacher.path."""
        limits = self.limits(self.config.ref, "log_prob")
        log_probs = compute_log_prob(self.teacher_engine, data, limits, self.config.rollout.temperature)
        return DataProto.from_dict({"teacher_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """One training step; see `DataParallelPPOActor.update_policy`. The metrics are the same on every
        rank. meta_info `skipped_update` says why an update was skipped last ("" if none was).
        """
        metrics = self.actor.update_policy(data)
        return DataProto(meta_info={"metrics": metrics, "skipped_update": self.actor.loop.skipped_update})

    # ----------------------------------------------------------------------------------------- checkpoints

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """As any worker's, with a reference that was reset."""
        if self.rollout_engine is not None:  # its memory may be needed for an optimizer that is offloaded
            self._sleep(self.rollout_engine)
        if self.has_ref:
            self.reference.save(Path(path))
        super().save_checkpoint(path, background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        super().load_checkpoint(path)
        if self.has_ref:
            self.reference.load(Path(path))
        self._rollout_weights_stale = True  # even if they have the same version


class CriticWorker(TrainingWorker):
    """One rank of the critic. config: the `critic` block; rollout_n: `rollout.n`; the others as for the
    actor.
    """

    def __init__(self, config: Critic, rollout_n: int = 1, device: str = "auto", seed: int = 0):
        super().__init__(config, device, config)
        self.rollout_n = rollout_n
        self.seed = seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the backbone and makes the head."""
        config = self.config
        fsdp = self.config.model.fsdp_config
        self.engine = self.build_engine(
            config.model, fsdp, config.megatron, config.optim, config.grad_clip, is_policy=False
        )
        self.updater = self.critic = DataParallelPPOCritic(
            config, self.engine, self.limits(config, "ppo"), self.rollout_n, self.seed
        )

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """values [N, R]."""
        return DataProto.from_dict({"values": self.critic.compute_values(data)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """One training step; see `DataParallelPPOCritic.update_critic`. Returns what update_actor does."""
        metrics = self.critic.update_critic(data)
        return DataProto(meta_info={"metrics": metrics, "skipped_update": self.critic.loop.skipped_update})
