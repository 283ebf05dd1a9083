"""Models from Hugging Face folders, wrapped for training: packed tokens in, numbers per loss token out.

The last decoder layer is computed only for the tokens whose hidden states are used. In a trajectory with
retrieved text, fewer than half of the tokens predict a loss token. The last layer needs keys and values of
all tokens, but queries, output and feed-forward network only of those.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.utils import logging as transformers_logging

from verl.config.schema import AnyFsdp
from verl.packing.attention import PACKED_ATTENTION, Packing
from verl.packing.linear_logprob import linear_log_prob
from verl.packing.packs import PackedMicroBatch
from verl.utils.importing import describe
from verl.utils.safetensors_file import INDEX_FILE, shapes_in, weight_files
from verl.workers.engine.lora import Adapters, adapter_config, add_adapters, load_adapter, wants_adapters
from verl.workers.engine.model_files import ModelFiles

PLAIN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
FASTEST = "fastest"  # value of param_dtype: the type in which this machine is faster
transformers_logging.disable_progress_bar()  # a run has a progress display of its own
# Transformers reports a critic's unused head and layers that no process shares, which looks like an error.
# Missing weights raise a ValueError in this module.
for _name in ("modeling_utils", "distributed.tensor_parallel"):
    transformers_logging.get_logger(f"transformers.{_name}").setLevel(transformers_logging.ERROR)

# Changes that some models make to their logits after the head. Log-probabilities here are those of
# hidden @ weight.T alone.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class Precision:
    """The dtypes of the stored weights and of the computation.

    Gradients travel between processes in float32.
    """

    model: torch.dtype
    compute: torch.dtype

    @classmethod
    def from_config(cls, fsdp_config: AnyFsdp, device: torch.device, trained: bool = True) -> Precision:
        """Read the dtypes from an `fsdp_config` block.

        If `param_dtype` is null, the computation is in bf16 on CUDA and in fp32 on CPU. `fastest` means the
        same before `decide_machine_settings` (verl/planning/placement.py) has measured. If `model_dtype` is
        null, weights are stored in fp32 if they are trained, and in the dtype of the computation otherwise.
        """
        name = fsdp_config.mixed_precision.param_dtype
        if name in (None, FASTEST):
            name = "bf16" if device.type == "cuda" else "fp32"
        stored = fsdp_config.model_dtype or ("fp32" if trained else name)
        return cls(DTYPES[stored], DTYPES[name])


def shorten_last_layer(backbone: nn.Module) -> bool:
    """Let the last layer compute only wanted tokens.

    The backbone's forward then takes a keyword `output_positions`, the positions of these tokens in the pack,
    ascending. With it the backbone returns hidden states [1, Q, D] instead of [1, T, D], those of the Q
    wanted tokens that this process has.

    Return False, and change nothing, if the layer is not one of PLAIN_LAYERS or Gemma 3's.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or type(layers[-1]) not in (*PLAIN_LAYERS, Gemma3DecoderLayer):
        return False
    layer: Any = layers[-1]
    layer.forward = MethodType(_short_forward, layer)
    return True


def _short_forward(
    self: Any,
    hidden_states: Tensor,
    *,
    packing: Packing,
    output_positions: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if output_positions is None:
        output: Tensor = type(self).forward(self, hidden_states, packing=packing, **kwargs)
        return output
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(
        hidden_states=normed, packing=replace(packing, output_positions=output_positions), **kwargs
    )
    local_positions = packing.local_positions(output_positions)
    rows = hidden_states.index_select(1, local_positions)
    attended = attended.index_select(1, local_positions)
    if isinstance(self, Gemma3DecoderLayer):  # it also norms the output of each half
        rows = rows + self.post_attention_layernorm(attended)
        return rows + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(rows)))
    rows = rows + attended
    out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
    return out


@dataclass(frozen=True)
class UnreadWeights:
    """The weights that are still in a folder.

    Attributes:
        folder: the folder.
        names: name of a parameter, as it is without adapters -> its name in the files.
    """

    folder: Path
    names: dict[str, str]

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Give the parameters memory on the device, and read the part of each that this process holds."""
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        parameters = {name.replace(".base_layer.", "."): p.detach() for name, p in model.named_parameters()}
        tensors = {self.names[name]: tensor for name, tensor in parameters.items() if name in self.names}
        assert tensors.keys() == set(self.names.values())
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)


class PolicyModel(nn.Module):
    """A causal language model that computes statistics of each loss token of a micro-batch.

    Args:
        model: the Hugging Face model.
        adapters: its LoRA adapters, if it has any.
        unread: its weights, if they are not loaded yet.
    """

    def __init__(
        self, model: PreTrainedModel, adapters: Adapters | None = None, unread: UnreadWeights | None = None
    ):
        super().__init__()
        self.model = model
        self.adapters = adapters
        self.unread = unread
        self.is_short = shorten_last_layer(model.base_model)
        self.log_prob: Callable[..., tuple[Tensor, Tensor, Tensor]] = linear_log_prob

    def forward(
        self,
        micro_batch: PackedMicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log_probs, entropy, sum_pi_squared), each [U] float32, one number per distinct loss token.

        See `linear_log_prob`.
        """
        hidden = _hidden_states(self.model.base_model, micro_batch, self.is_short)
        weight = self.model.get_output_embeddings().weight
        labels = micro_batch.labels
        return self.log_prob(hidden, weight, labels, temperature, with_entropy, with_sum_pi_squared)


class ValueModel(nn.Module):
    """A backbone with a scalar head, for the value of the state before each loss token of a micro-batch."""

    def __init__(
        self, model: PreTrainedModel, adapters: Adapters | None = None, unread: UnreadWeights | None = None
    ):
        super().__init__()
        self.model = model
        self.adapters = adapters
        self.unread = unread
        self.is_short = shorten_last_layer(model)
        width = model.config.get_text_config().hidden_size
        dtype = torch.float32 if adapters else next(model.parameters()).dtype
        self.value_head = nn.Linear(width, 1, dtype=dtype)
        self.value_head.load_state_dict(initial_value_head(width))

    def forward(self, micro_batch: PackedMicroBatch) -> tuple[Tensor]:
        """Return (values,), [U] float32, one number per distinct loss token."""
        hidden = _hidden_states(self.model, micro_batch, self.is_short)
        values = self.value_head(hidden.to(self.value_head.weight.dtype))
        return (values.squeeze(-1).float().clone(),)  # not a view, because FSDP2 hooks on to the result


def initial_value_head(width: int) -> dict[str, Tensor]:
    """Return weight [1, width] and bias [1] of a new critic's head.

    They are near 0, and the same for every process and run.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, width, generator=generator) * (0.01 / width**0.5)
    return {"weight": weight, "bias": torch.zeros(1)}


def _hidden_states(backbone: nn.Module, micro_batch: PackedMicroBatch, is_short: bool) -> Tensor:
    """Return the hidden states [U, D] that predict the distinct loss tokens.

    `is_short` says whether the last layer is shortened; see `shorten_last_layer`.
    """
    output = backbone(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        packing=micro_batch.packing,
        **({"output_positions": micro_batch.predicting} if is_short else {}),
    )
    rows = micro_batch.predicted_from
    if is_short:
        rows = torch.searchsorted(micro_batch.packing.local_positions(micro_batch.predicting), rows)
    return output.last_hidden_state[0].index_select(0, rows)


def keep_stream_in_float32(backbone: Any) -> None:
    """Keep the residual stream of a computation in bfloat16 in float32, as in rollouts of the native engine.

    The stream begins in float32, whatever the type of the embedding (FSDP2 gathers it in bfloat16), and stays
    so under autocast. The factor on Gemma's embeddings is rounded, as in the native engine and in Hugging
    Face's model, but the product is not.
    """
    embedding = backbone.get_input_embeddings()
    factor = 1.0
    if hasattr(embedding, "embed_scale"):
        factor = float(embedding.embed_scale.bfloat16())
        embedding.embed_scale.fill_(1.0)
    embedding.register_forward_hook(lambda module, arguments, output: output.float() * factor)
    for module in backbone.modules():
        if isinstance(module, nn.LayerNorm) and module.weight is not None:
            module.register_forward_pre_hook(_cast_to_norm_dtype)


def _cast_to_norm_dtype(norm: nn.LayerNorm, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Return the input of a layer norm in the norm's type, because on CPU torch takes no other type.

    On CUDA autocast handles it.
    """
    return inputs[0] if inputs[0].is_cuda else inputs[0].to(norm.weight.dtype)


def load_policy(
    model_config: Mapping[str, Any],
    dtype: torch.dtype,
    with_adapters: bool = True,
    reads_weights: bool = True,
) -> PolicyModel:
    """Load the policy that `actor_rollout_ref.model` describes, on CPU.

    Args:
        model_config: the `model` block.
        dtype: the dtype of the weights.
        with_adapters: whether to add the LoRA adapters of the block. False is for a model that is not
            trained.
        reads_weights: False leaves the weights in the folder, where each process can read its part of them
            (`unread`).

    Raises:
        ValueError: the folder or the model does not fit.
    """
    model, adapters, unread = _load_model(
        model_config, AutoModelForCausalLM, dtype, with_adapters, reads_weights
    )
    text_config = model.config.get_text_config()
    for name in LOGIT_TRANSFORMS:
        if getattr(text_config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{model_config['path']}: {type(model).__name__} changes its logits by {name}, which is not "
                "supported; use a model without it (Qwen2, Qwen3, Llama and Mistral are tested)."
            )
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"{model_config['path']}: {type(model).__name__} has no output matrix, or one with a bias; "
            "expected a causal language model like Qwen2, Qwen3, Llama or Mistral."
        )
    return PolicyModel(model, adapters, unread)


def load_value_model(
    model_config: Mapping[str, Any], dtype: torch.dtype, reads_weights: bool = True
) -> ValueModel:
    """Load the critic that `critic.model` describes, on CPU: the folder's backbone with a new head.

    The arguments are those of `load_policy`.
    """
    return ValueModel(*_load_model(model_config, AutoModel, dtype, reads_weights=reads_weights))


def load_hf_config(model_config: Mapping[str, Any]) -> PretrainedConfig:
    """Return the model's configuration with `override_config` applied, settled with the folder's files.

    Everything that asks what the model is asks here; see `ModelFiles`.

    Raises ValueError for a bad folder or key, and for files of another shape than the configuration.
    """
    config = load_hf_config_as_stored(model_config)
    source = _source(model_config)
    for key, value in (model_config.get("override_config") or {}).items():
        if not hasattr(config, key):
            raise ValueError(
                f"model.override_config: {type(config).__name__} of {source} has no field {key!r}."
            )
        setattr(config, key, value)
    files = ModelFiles.read(Path(source))
    if files is not None:
        files.settle(config)
    return config


def load_hf_config_as_stored(model_config: Mapping[str, Any]) -> PretrainedConfig:
    """Return what config.json says, which others read; `load_hf_config` says what the model is.

    `external_lib` is imported first, because it may register the configuration's class.

    Raises ValueError for a bad folder, and for an `external_lib` that can't be imported.
    """
    if library := model_config.get("external_lib"):
        try:
            importlib.import_module(library)
        except Exception as error:  # it is a user's module, which may raise anything
            raise ValueError(
                f"Found model.external_lib={library}, which can't be imported ({describe(error)}); expected "
                "a module in the working directory or in PYTHONPATH."
            ) from error
    source = _source(model_config)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=model_config.get("trust_remote_code", False)
        )
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Model {source}: its configuration can't be read ({reason}).") from error
    return config


def check_heads(model_config: Mapping[str, Any], num_token_sharing: int) -> None:
    """Check that `num_token_sharing` processes can share the model's attention heads.

    Raises ValueError if their number does not divide that of the heads.
    """
    if num_token_sharing == 1:
        return
    num_heads = load_hf_config(model_config).get_text_config().num_attention_heads
    if num_heads % num_token_sharing:
        good = [size for size in range(2, num_heads + 1) if num_heads % size == 0]
        raise ValueError(
            f"Found ulysses_sequence_parallel_size={num_token_sharing}, but {model_config['path']} has "
            f"{num_heads} attention heads; expected a number that divides them: {', '.join(map(str, good))}."
        )


def _source(model_config: Mapping[str, Any]) -> str:
    """Return the local folder, or the name on the Hugging Face hub, that `model.path` stands for.

    Raises ValueError if the path is not set, or is a folder that is missing or has no config.json.
    """
    path = model_config.get("path")
    if not path:
        raise ValueError(
            "model.path is not set; expected a Hugging Face folder (config.json, *.safetensors)."
        )
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"Model folder {folder} has no config.json; expected a Hugging Face folder.")
        return str(folder)
    if str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1:
        raise ValueError(f"Model folder {folder} does not exist; expected a Hugging Face folder.")
    return str(path)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create parameters without memory inside the block; buffers are created as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one on meta already is being tied
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace parameters on "meta" by a single number on the CPU each, inside the block.

    PEFT draws tensors at random, and puts each on the device of the matrix that it stands beside. With the
    stand-ins this device is the CPU.
    """
    slots = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    for module, name, parameter in slots:
        if parameter is not None and parameter.is_meta:
            stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            module._parameters[name] = nn.Parameter(stand_in, parameter.requires_grad)
    yield
    for module, name, parameter in slots:
        if parameter is not None and parameter.is_meta:
            parameter.requires_grad_(module.get_parameter(name).requires_grad)
            module._parameters[name] = parameter


def _build_unread(
    auto_class: Any, config: PretrainedConfig, folder: Path, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, UnreadWeights] | None:
    """Create the model with weights that are unread.

    Return None if the files have other names or shapes than the model, or if there are more files than the
    model's.
    """
    files = {path.name for path in weight_files(folder)}
    if {path.name for path in folder.glob("*.safetensors")} != files:
        return None
    if files != {"model.safetensors"} and not (folder / INDEX_FILE).is_file():
        return None
    with parameters_on_meta():
        model = auto_class.from_config(config, **options)
    shapes = shapes_in(folder)
    names = {}
    if any(name in shapes for name, _ in model.named_buffers()):
        return None
    for name, parameter in model.named_parameters():
        candidates = name, f"{model.base_model_prefix}.{name}"  # the second one: in a policy's folder
        matches = [candidate for candidate in candidates if shapes.get(candidate) == tuple(parameter.shape)]
        if not matches:
            return None
        names[name] = matches[0]
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, UnreadWeights(folder, names)


def _load_model(
    model_config: Mapping[str, Any],
    auto_class: Any,
    dtype: torch.dtype,
    with_adapters: bool = True,
    reads_weights: bool = True,
) -> tuple[PreTrainedModel, Adapters | None, UnreadWeights | None]:
    config = load_hf_config(model_config)
    source = _source(model_config)
    folder = Path(source)
    has_safetensors = any(folder.glob("*.safetensors")) if folder.is_dir() else False
    if folder.is_dir() and not has_safetensors and not any(folder.glob("*.bin")):
        raise ValueError(f"Model folder {source} has no weights; expected *.safetensors beside config.json.")
    options = {
        "dtype": dtype,
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": model_config.get("trust_remote_code", False),
    }
    empty = (
        None if reads_weights or not has_safetensors else _build_unread(auto_class, config, folder, options)
    )
    model, unread = empty or (_load_weights(auto_class, config, source, options), None)
    for module in model.modules():  # chance must not influence a token's probability
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if model_config.get("enable_gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapters = None
    if with_adapters and wants_adapters(model_config):
        with stand_ins(model):
            adapters = add_adapters(model, adapter_config(model_config), model_config["path"])
        if model_config.get("lora_adapter_path") is not None:
            load_adapter(adapters, model_config["lora_adapter_path"])
    return model.train(), adapters, unread


def set_forward(layer: Any, function: Callable[..., torch.Tensor]) -> None:
    """Let a layer compute by `function`, with gradient checkpointing around it where that is on.

    Transformers has its own checkpointing around the layer or inside its forward, depending on its version.
    It is switched off. Nothing is random in a layer, so checkpoints keep no state of generators.
    Non-reentrant checkpoints put a hook on each saved tensor, which costs the host milliseconds, so only a
    layer whose inputs need no gradient uses them.
    """
    checkpoints = getattr(layer, "gradient_checkpointing", False)
    layer.gradient_checkpointing = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        if checkpoints and layer.training and torch.is_grad_enabled():
            reenters = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
            again = partial(function, **kwargs)
            return checkpoint(again, *args, use_reentrant=reenters, preserve_rng_state=False)
        return function(*args, **kwargs)

    layer.forward = forward


def _load_weights(
    auto_class: Any, config: PretrainedConfig, source: str, options: Mapping[str, Any]
) -> PreTrainedModel:
    """Load the model with its weights.

    Raises ValueError if they are not the weights of the configuration.
    """
    # Weights of another shape are reported below, in one line, and not raised with a traceback.
    options = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = auto_class.from_pretrained(source, config=config, **options)
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    problems += [
        f"{name} has shape {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    if problems:
        raise ValueError(
            f"Model {source}: {len(problems)} parameters have no weights or some of another shape "
            f"({', '.join(problems[:3])}); config.json with override_config doesn't fit the weights."
        )
    loaded: PreTrainedModel = model
    return loaded
