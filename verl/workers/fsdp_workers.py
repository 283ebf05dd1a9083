"""The workers of a training job: the policy with its rollout engine and reference, and the critic.

    generate_sequences -> compute_log_prob, compute_ref_log_prob -> update_actor      (ActorRolloutRefWorker)
                          compute_values -> update_critic                             (CriticWorker)

The policy, the rollout engine and the reference live in one process. `sync_weights` gives the policy's
weights to the rollout engine. On CUDA the native engine reads the policy's own tensors if there is one
process and the dtype is the same, so an update needs no copy. On CPU it packs a copy of them after each
update.
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

from verl.config import Block
from verl.config.policy import Actor, ActorRolloutRef, Megatron, Optim
from verl.config.schema import AnyFsdp, Critic
from verl.protocol import DataProto
from verl.sessions.engine_contract import RolloutEngine
from verl.single_controller.base import DataPosition, Dispatch, Worker, register
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn
from verl.utils.device import free_large_tensors_at_once
from verl.workers.actor.dp_actor import DataParallelPPOActor, compute_log_prob, token_statistics
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.flops import PEAK_FLOPS, peak_flops
from verl.workers.engine.fsdp_engine import TrainEngine
from verl.workers.engine.loading import Precision, check_heads, load_policy, load_value_model
from verl.workers.engine.reference import Reference
from verl.workers.engine.snapshot import BackgroundWriter
from verl.workers.engine.training_engine import Engine
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.rollout import build
from verl.workers.rollout.collective import CollectiveSender, MeetingPoint

STATE_FILE = "update.json"
ROLES = ("actor", "actor_rollout", "actor_rollout_ref")


class Agent(Protocol):
    """An object that turns prompts into trajectories with a rollout engine."""

    def run_llm_loop(self, gen_batch: DataProto) -> DataProto: ...

    def close(self) -> None: ...


AgentFactory = Callable[[PreTrainedTokenizerBase, RolloutEngine], Agent]


def device_kind(device: str) -> str:
    """Return "cpu" or "cuda" for a configured device.

    "auto" means CUDA if it is available, and the CPU otherwise. Raises ValueError for any other value.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: found {device!r}, expected auto, cpu or cuda.")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


class TrainingWorker(Worker):
    """One rank that trains a model and writes its checkpoints.

    Args:
        config: a block of the configuration that has `model`.
        device: "auto" (CUDA if it is available), "cpu" or "cuda".
        block: the configuration of the model's update. It says how many processes share each micro-batch's
            tokens. None means that no other process shares them.
    """

    config: Any
    engine: Engine
    tokenizer: Any = None  # a policy's tokenizer, which is saved with the policy
    updater: DataParallelPPOActor | DataParallelPPOCritic | None = None  # its state is saved in checkpoints

    def __init__(self, config: Any, device: str, block: Actor | Critic | None = None) -> None:
        super().__init__()
        self.config = config
        self.device = self.init_process_group(device_kind(device))
        if self.device.type == "cpu":
            free_large_tensors_at_once()
        self.checkpoint_writer = BackgroundWriter()
        self.num_token_sharing = 1 if block is None else self.count_token_sharing(block)

    def count_token_sharing(self, block: Actor | Critic) -> int:
        """Return how many processes share the tokens of a micro-batch."""
        return int(block.ulysses_sequence_parallel_size)

    def build_engine(
        self,
        model: Mapping[str, Any],
        fsdp_config: AnyFsdp,
        megatron: Megatron | None = None,
        optim: Optim | None = None,
        grad_clip: float = 1.0,
        is_policy: bool = True,
        with_adapters: bool = True,
    ) -> Engine:
        """Build the engine of a policy or of a value model.

        Args:
            model: the `model` block of the configuration.
            fsdp_config: the `fsdp_config` block.
            megatron: the `megatron` block.
            optim: the `optim` block. Without it the engine is frozen.
            grad_clip: the largest norm of the gradient.
            is_policy: True for a policy, False for a value model.
            with_adapters: whether the model gets the LoRA adapters that its block asks for.
        """
        check_heads(model, self.num_token_sharing)
        precision = Precision.from_config(fsdp_config, self.device, trained=optim is not None)
        reads_weights = self.world_size == 1  # with several processes, each reads its own part later
        return TrainEngine(
            load_policy(model, precision.model, with_adapters, reads_weights)
            if is_policy
            else load_value_model(model, precision.model, reads_weights),
            precision,
            fsdp_config,
            self.device,
            self.world_size,
            optim,
            grad_clip,
            self.num_token_sharing,
        )

    def rate(self) -> dict[str, float | None]:
        """Return `peak_flops` of this rank's device, None if it is not known, as meta_info of an update."""
        return {PEAK_FLOPS: peak_flops(self.device, self.engine.precision.compute)}

    def read_limits(self, block: Block, prefix: str) -> MicroBatchLimits:
        """Read the limits of this rank's micro-batches from a block; see `MicroBatchLimits.from_config`."""
        padded = not self.config.model.use_remove_padding
        return MicroBatchLimits.from_config(block, prefix, self.device, padded, self.num_token_sharing)

    @register()
    def data_position(self) -> DataPosition:
        """Return the engine's share of the rows; it is known from `init_model` on."""
        return self.engine.data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """Save everything that training resumes from in the folder `path`.

        A policy's weights are also saved as a Hugging Face folder, `path`/huggingface. With `background` the
        files may be incomplete until `checkpoint_is_written` returns True.
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
        """Return whether the last checkpoint is no longer being written. With `wait`, wait for its end first.

        Raises CheckpointFailed if the checkpoint could not be written.
        """
        return self.checkpoint_writer.is_done(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Resume from a folder of `save_checkpoint`, which any number of processes may have written.

        Raises ValueError if the folder has no state of the update.
        """
        self.engine.load(path)
        # a checkpoint with weights alone is a start from step 0, and has no such file
        if self.updater is not None and self.engine.num_training_steps:
            file = Path(path) / STATE_FILE
            if not file.is_file():
                problem = f"Checkpoint {path} has no {STATE_FILE}"
                raise ValueError(f"{problem}; expected a folder that a run saved.")
            self.updater.load_state_dict(json.loads(file.read_text()))

    def close(self) -> None:
        self.checkpoint_writer.close()
        super().close()


class ActorRolloutRefWorker(TrainingWorker):
    """One rank of the policy, which trains it, samples from it and keeps a frozen copy as the reference.

    The reference is the policy as it was at the start of training.

    Args:
        config: the `actor_rollout_ref` block.
        role: "actor_rollout_ref", or "actor_rollout" or "actor" for a worker without a reference.
        agent_factory: maps (tokenizer, rollout engine) to an agent. `generate_sequences` needs it.
        device: "auto" (CUDA if it is available), "cpu" or "cuda".
        seed: the seed of the order of mini-batches, which `actor.shuffle` turns on.
    """

    streams_own_parameters = True  # with one process, the weight stream gives the parameters, not copies

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
        self._weight_sender: CollectiveSender | None = None
        rollout = config.rollout
        self.num_sampling_together = 1  # number of processes that sample from one model
        if rollout.placement == "colocated" and build.engine_name(rollout, self.device) == "vllm":
            per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.num_sampling_together = build.model_parallel_size(rollout, config.model, per_node)
        replica, rank_in_replica = divmod(self.rank, self.num_sampling_together)
        self._register_dispatch_collect_info("rollout", replica, rank_in_replica == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models.

        Raises ValueError if a model's folder is missing or does not fit.
        """
        config = self.config
        actor = self.config.actor
        ref = self.config.ref
        self.tokenizer = AutoTokenizer.from_pretrained(
            str(Path(config.model.path).expanduser()), trust_remote_code=config.model.trust_remote_code
        )
        fsdp = actor.fsdp_config
        megatron = actor.megatron
        self.engine = self.build_engine(config.model, fsdp, megatron, actor.optim, actor.grad_clip)
        limits = self.read_limits(actor, "ppo")
        temperature = config.rollout.temperature
        self.updater = self.actor = DataParallelPPOActor(
            actor, self.engine, limits, temperature, config.rollout.n, self.seed
        )
        if config.teacher.path is not None:
            self.teacher_engine = self._load_teacher()
        if self.has_ref:
            own_engine = None
            if self.engine.adapters is None:
                own_engine = self.build_engine(
                    config.model, ref.fsdp_config, ref.megatron, with_adapters=False
                )
            self.reference = Reference(self.engine, own_engine)

    def _load_teacher(self) -> Engine:
        """Load the frozen model that distillation learns from, with the settings of the reference.

        Raises ValueError if its folder does not fit, or if its vocabulary is not the policy's.
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
        return self.build_engine(source, ref.fsdp_config, ref.megatron, with_adapters=False)

    # --------------------------------------------------------------------------------------------- rollout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, num_rows: int, training_bytes: int | None = None) -> None:
        """Create the agent and its rollout engine, unless they exist already.

        Args:
            num_rows: the trajectories of this process and of the processes that share its model.
            training_bytes: the bytes of the GPU that training holds, as in `EngineRequest`. On CUDA, None
                means the bytes that are in use now.

        Raises:
            ValueError: the worker has no agent_factory, or a reason of `build_rollout_engine` applies.
            EngineUnavailable: see `build_rollout_engine`.
        """
        if self.agent is not None:
            return
        if self.agent_factory is None:
            raise ValueError("generate_sequences needs a worker made with an agent_factory.")
        rollout = self.config.rollout
        if training_bytes is None and self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            training_bytes = total - free
        dtype = build.rollout_dtype(rollout, self.engine.precision.compute)
        request = build.EngineRequest(
            self.device,
            dtype,
            rollout.prompt_length,
            num_rows,
            self.rank,
            self.world_size,
            copies_weights=not self.streams_own_parameters
            or self.world_size > 1
            or dtype != self.engine.precision.model
            or self.engine.adapters is not None,
            training_bytes=training_bytes,
            tensor_parallel_size=self.num_sampling_together,
        )
        with self.engine.loaded():  # so that an engine that measures free memory sees what will be free
            self.rollout_engine = build.build_rollout_engine(rollout, self.config.model, request)
        self.agent = self.agent_factory(self.tokenizer, self.rollout_engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> None:
        """Give the policy's present weights to the rollout engine. Call it after an update.

        The engine is then awake until `generate_sequences` or `save_checkpoint` puts it to sleep. Nothing
        happens if the engine already has these weights, or does not exist yet. A new engine takes its weights
        at its first generation.

        If nobody calls this method after an update, `generate_sequences` syncs on demand. With
        `param_offload` and colocated rollouts the method leaves it to `generate_sequences`, so that the
        engine holds no device memory before it generates.
        """
        if self.config.rollout.name == "remote" or not self.engine.offloads_params:
            self._load_rollout_weights_if_stale()

    def _load_rollout_weights_if_stale(self) -> None:
        """Load the policy's weights into the rollout engine, unless there is none or it has them."""
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
        """Return the name of the torch dtype of the weights that rollouts take."""
        dtype = build.rollout_dtype(self.config.rollout, self.engine.precision.compute)
        return str(dtype).removeprefix("torch.")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def export_weights(
        self, version: int = 0, folder: Path | None = None, deadline: float = 1800.0
    ) -> list[tuple[str, torch.Tensor]] | MeetingPoint | Path | None:
        """Export the policy's present weights for rollout processes, as `rollout.weight_transfer` says.

        All ranks call it together. With `collective`, a thread of rank 0 broadcasts the weights as `version`
        (see `CollectiveSender`). With `folder`, a thread of rank 0 writes them there (see `WeightWriter`).
        Either happens after the previous call's weights are sent or written.

        Args:
            version: the version of the weights.
            folder: where to write them; None if they do not go into files.
            deadline: `collective`: the seconds that each act of a rollout process may take.

        Returns:
            On rank 0 the meeting point, the folder, or (Hugging Face name, copy in CPU memory) pairs in the
            dtype of the rollouts. None on other ranks.

        Raises:
            EngineUnavailable: if no rollout process took the previous call's weights.
        """
        dtype = getattr(torch, self.rollout_dtype())
        with self.engine.loaded(), torch.no_grad():
            pairs = self.engine.weights(dtype)
            if self.rank != 0:
                for _ in pairs:  # the ranks gather each tensor together
                    pass
                return None
            if self.config.rollout.weight_transfer == "collective":
                return self._collective_sender(deadline).send_in_background(pairs, version)
            weights = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in pairs]
        if folder is None:
            return weights
        if self._weight_writer is None:
            from verl.utils.weight_files import WeightWriter

            rollout = self.config.rollout
            readers = [f"rollout-{rank}" for rank in range(rollout.num_processes)]
            anchor_every = rollout.anchor_every if rollout.weight_transfer == "delta" else 1
            self._weight_writer = WeightWriter(folder, anchor_every, readers)
        self._weight_writer.write_in_background(weights, version)
        return folder

    def _collective_sender(self, deadline: float) -> CollectiveSender:
        """Return the sender to all rollout processes, which is made once."""
        if self._weight_sender is None:
            rollout = self.config.rollout
            self._weight_sender = CollectiveSender(
                os.environ.get("MASTER_ADDR", "127.0.0.1"),
                rollout.num_processes,
                build.weight_backend(rollout, self.device),
                self.device,
                deadline,
            )
        return self._weight_sender

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Run the agent on `raw_prompt_ids` with `sampling_seeds` and return one trajectory per row.

        Processes that sample from one model get the same rows, and the result of the first of them counts.
        """
        self.start_rollout(len(prompts))
        agent = self.agent
        engine = self.rollout_engine
        assert agent is not None and engine is not None
        with ExitStack() as policy_on_device, torch.no_grad():
            if build.engine_name(self.config.rollout, self.device) == "native":  # reads the policy's weights
                policy_on_device.enter_context(self.engine.loaded())
            self._load_rollout_weights_if_stale()
            engine.wake()
            with engine.leading() as leads:
                result = agent.run_llm_loop(prompts) if leads else DataProto()
            self._sleep_if_configured(engine)
        return result

    def _sleep_if_configured(self, engine: RolloutEngine) -> None:
        """Give the engine's memory on this device to the trainer until the next generation.

        Nothing happens unless `rollout.free_cache_engine` or `param_offload` is on.
        """
        rollout = self.config.rollout
        if rollout.name == "remote" or not (rollout.free_cache_engine or self.engine.offloads_params):
            return
        # At level 1 vLLM would keep weights in the node's memory, although the next update replaces them.
        # The native engine uses the trainer's own weights, so level 1 is enough unless those are offloaded.
        is_vllm = build.engine_name(rollout, self.device) == "vllm" and self.device.type == "cuda"
        level = 2 if self.engine.offloads_params or is_vllm else 1
        engine.sleep(level)
        self._rollout_weights_stale = self._rollout_weights_stale or level == 2

    def close(self) -> None:
        with ExitStack() as cleanup:  # runs the callbacks in reverse order, each even if another one raises
            cleanup.callback(super().close)
            if self.rollout_engine is not None:
                cleanup.callback(self.rollout_engine.shutdown)
            if self.agent is not None:
                cleanup.callback(self.agent.close)
            if self._weight_writer is not None:
                cleanup.callback(self._weight_writer.close)
            if self._weight_sender is not None:
                cleanup.callback(self._weight_sender.close)
            cleanup.callback(self.checkpoint_writer.close)  # while the process groups that it uses exist

    # ------------------------------------------------------------------------------- log-probs and the update

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return `old_log_probs` [N, R] of the present policy.

        With meta_info `calculate_entropy` the result also has `entropys`, and with `calculate_sum_pi_squared`
        it also has `sum_pi_squared`. See `token_statistics`.
        """
        limits = self.read_limits(self.config.rollout, "log_prob")
        options = [data.meta_info.get(f"calculate_{name}", False) for name in ("entropy", "sum_pi_squared")]
        results = token_statistics(self.engine, data, limits, self.config.rollout.temperature, *options)
        return DataProto.from_dict({"old_log_probs": results.pop("log_probs"), **results})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return `ref_log_prob` [N, R] of the reference.

        The reference is the model that training started from or, after `reset_reference`, the policy at the
        time of the last reset.
        """
        limits = self.read_limits(self.config.ref, "log_prob")
        with self.reference.active() as engine:
            log_probs = compute_log_prob(engine, data, limits, self.config.rollout.temperature)
        return DataProto.from_dict({"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset_reference(self) -> None:
        """Make the present policy the reference, which is part of checkpoints from then on."""
        self.reference.reset()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Return `teacher_log_prob` [N, R] of the model at `teacher.path`."""
        limits = self.read_limits(self.config.ref, "log_prob")
        log_probs = compute_log_prob(self.teacher_engine, data, limits, self.config.rollout.temperature)
        return DataProto.from_dict({"teacher_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """Make one training step; see `DataParallelPPOActor.update_policy`.

        The result has meta_info `metrics`, which are the same on every rank, `skipped_update`, the reason why
        the last skipped update was skipped ("" if none was), and `peak_flops` of a rank's device.
        """
        metrics = self.actor.update_policy(data)
        skipped = self.actor.loop.skipped_update
        return DataProto(meta_info={"metrics": metrics, "skipped_update": skipped, **self.rate()})

    # ----------------------------------------------------------------------------------------- checkpoints

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """Save a checkpoint as any worker does, together with the reference if it was reset."""
        if self.rollout_engine is not None:  # an offloaded optimizer may need the engine's memory
            self._sleep_if_configured(self.rollout_engine)
        if self.has_ref:
            self.reference.save(Path(path))
        super().save_checkpoint(path, background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        super().load_checkpoint(path)
        if self.has_ref:
            self.reference.load(Path(path))
        self._rollout_weights_stale = True  # even if the engine's weights have the same version number


class CriticWorker(TrainingWorker):
    """One rank of the critic.

    Args:
        config: the `critic` block.
        rollout_n: `rollout.n`.
        device: as for the actor.
        seed: as for the actor.
    """

    def __init__(self, config: Critic, rollout_n: int = 1, device: str = "auto", seed: int = 0):
        super().__init__(config, device, config)
        self.rollout_n = rollout_n
        self.seed = seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the backbone and create the value head."""
        config = self.config
        fsdp = self.config.model.fsdp_config
        self.engine = self.build_engine(
            config.model, fsdp, config.megatron, config.optim, config.grad_clip, is_policy=False
        )
        self.updater = self.critic = DataParallelPPOCritic(
            config, self.engine, self.read_limits(config, "ppo"), self.rollout_n, self.seed
        )

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values` [N, R]."""
        return DataProto.from_dict({"values": self.critic.compute_values(data)})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """Make one training step; see `DataParallelPPOCritic.update_critic`.

        The result has the same meta_info as that of `ActorRolloutRefWorker.update_actor`.
        """
        metrics = self.critic.update_critic(data)
        skipped = self.critic.loop.skipped_update
        return DataProto(meta_info={"metrics": metrics, "skipped_update": skipped, **self.rate()})
