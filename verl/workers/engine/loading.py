"""Models from Hugging Face folders, wrapped for training: packed tokens in, numbers per loss token out.

The last decoder layer is computed only for the tokens whose hidden states are used: of a trajectory with
retrieved text fewer than half of the tokens predict a loss token. Keys and values of the last layer are
needed of all tokens; queries, output and feed-forward network only of those.
"""

from __future__ import annotations

import importlib
import json
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

from verl.utils.linear_logprob import linear_log_prob
from verl.utils.packed_attention import PACKED_ATTENTION, Packing
from verl.utils.packing import PackedMicroBatch
from verl.utils.safetensors_file import shapes_in
from verl.workers.engine.lora import Adapters, adapter_config, add_adapters, load_adapter, wants_adapters

PLAIN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
FASTEST = "fastest"  # param_dtype: whichever this machine is faster in
transformers_logging.disable_progress_bar()  # a run has a display of its own
# Its reports of a critic's unused head, and of layers that no process shares, look like faults; missing
# weights are refused below.
for _name in ("modeling_utils", "distributed.tensor_parallel"):
    transformers_logging.get_logger(f"transformers.{_name}").setLevel(transformers_logging.ERROR)

# What some models do to their logits after the head; log-probabilities here are of hidden @ weight.T alone.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class Precision:
    """dtypes of the stored weights and of the computation; gradients travel between processes in float32."""

    model: torch.dtype
    compute: torch.dtype

    @classmethod
    def from_config(
        cls, fsdp_config: Mapping[str, Any], device: torch.device, trained: bool = True
    ) -> Precision:
        """Null means: bf16 on CUDA, fp32 on CPU to compute in; of weights fp32 if trained, else the same.
        So does `fastest` before `place` (verl/trainer/placement.py) has measured.
        """
        name = fsdp_config["mixed_precision"]["param_dtype"]
        if name in (None, FASTEST):
            name = "bf16" if device.type == "cuda" else "fp32"
        stored = fsdp_config["model_dtype"] or ("fp32" if trained else name)
        return cls(DTYPES[stored], DTYPES[name])


def shorten_last_layer(backbone: nn.Module) -> bool:
    """Lets the last layer answer for `wanted` tokens alone (a keyword of the backbone's forward: their places
    in the pack, ascending), so that the backbone returns hidden states [1, Q, D] instead of [1, T, D]: those
    of the Q wanted tokens that this process has.

    Returns False, and changes nothing, where the layer is not one of PLAIN_LAYERS or Gemma 3's.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or type(layers[-1]) not in (*PLAIN_LAYERS, Gemma3DecoderLayer):
        return False
    layer: Any = layers[-1]
    layer.forward = MethodType(_short_forward, layer)
    return True


def _short_forward(
    self: Any, hidden_states: Tensor, *, packing: Packing, wanted: Tensor | None = None, **kwargs: Any
) -> Tensor:
    if wanted is None:
        whole: Tensor = type(self).forward(self, hidden_states, packing=packing, **kwargs)
        return whole
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, packing=replace(packing, wanted=wanted), **kwargs)
    own = packing.own(wanted)
    rows = hidden_states.index_select(1, own)
    attended = attended.index_select(1, own)
    if isinstance(self, Gemma3DecoderLayer):  # norms what each half gives back, too
        rows = rows + self.post_attention_layernorm(attended)
        return rows + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(rows)))
    rows = rows + attended
    out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
    return out


@dataclass(frozen=True)
class Unread:
    """Weights that are still in a folder: name of a parameter, without adapters -> its name in the files."""

    folder: Path
    names: dict[str, str]

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Gives the parameters memory on the device, and reads of each what this process holds of it."""
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        own = {name.replace(".base_layer.", "."): p.detach() for name, p in model.named_parameters()}
        tensors = {self.names[name]: tensor for name, tensor in own.items() if name in self.names}
        assert tensors.keys() == set(self.names.values())
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)


class PolicyModel(nn.Module):
    """A causal language model: what its distributions say of each loss token of a micro-batch. unread: its
    weights, where they are not there yet.
    """

    def __init__(
        self, model: PreTrainedModel, adapters: Adapters | None = None, unread: Unread | None = None
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
        """(log_probs, entropy, sum_pi_squared), all [U] float32, one for each distinct loss token; see
        `linear_log_prob`.
        """
        hidden = _hidden_states(self.model.base_model, micro_batch, self.is_short)
        weight = self.model.get_output_embeddings().weight
        labels = micro_batch.labels
        return self.log_prob(hidden, weight, labels, temperature, with_entropy, with_sum_pi_squared)


class ValueModel(nn.Module):
    """A backbone with a scalar head: the value of the state before each loss token of a micro-batch."""

    def __init__(
        self, model: PreTrainedModel, adapters: Adapters | None = None, unread: Unread | None = None
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
        """(values,), [U] float32, one for each distinct loss token."""
        hidden = _hidden_states(self.model, micro_batch, self.is_short)
        values = self.value_head(hidden.to(self.value_head.weight.dtype))
        return (values.squeeze(-1).float().clone(),)  # no view: FSDP2 hooks on to what is returned


def initial_value_head(width: int) -> dict[str, Tensor]:
    """weight [1, width] and bias [1] of a new critic's head: near 0, the same for every process and run."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, width, generator=generator) * (0.01 / width**0.5)
    return {"weight": weight, "bias": torch.zeros(1)}


def _hidden_states(backbone: nn.Module, micro_batch: PackedMicroBatch, is_short: bool) -> Tensor:
    """Hidden states [U, D] that predict the distinct loss tokens. is_short: see `shorten_last_layer`."""
    output = backbone(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        packing=micro_batch.packing,
        **({"wanted": micro_batch.predicting} if is_short else {}),
    )
    rows = micro_batch.predicted_from
    if is_short:
        rows = torch.searchsorted(micro_batch.packing.own(micro_batch.predicting), rows)
    return output.last_hidden_state[0].index_select(0, rows)


def keep_stream_in_float32(backbone: Any) -> None:
    """For a computation in bfloat16: the residual stream begins in float32, of whatever type the embedding is
    (FSDP2 gathers it in bfloat16), and under autocast it stays so, as in rollouts of the native engine. The
    factor on Gemma's embeddings is rounded, as there and in Hugging Face's, but the product is not.
    """
    embedding = backbone.get_input_embeddings()
    factor = 1.0
    if hasattr(embedding, "embed_scale"):
        factor = float(embedding.embed_scale.bfloat16())
        embedding.embed_scale.fill_(1.0)
    embedding.register_forward_hook(lambda module, arguments, output: output.float() * factor)
    for module in backbone.modules():
        if isinstance(module, nn.LayerNorm) and module.weight is not None:
            module.register_forward_pre_hook(_in_the_norms_type)


def _in_the_norms_type(norm: nn.LayerNorm, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """On a CPU torch's layer norm takes one type alone; on CUDA autocast sees to it."""
    return inputs[0] if inputs[0].is_cuda else inputs[0].to(norm.weight.dtype)


def load_policy(
    model_config: Mapping[str, Any], dtype: torch.dtype, with_adapters: bool = True, reads: bool = True
) -> PolicyModel:
    """The policy that `actor_rollout_ref.model` describes, on CPU. with_adapters: false leaves out the
    block's LoRA adapters, for a model that is not trained. reads: false leaves the weights in the folder,
    where they can be read in parts (`unread`).
    """
    model, adapters, unread = _load(model_config, AutoModelForCausalLM, dtype, with_adapters, reads)
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


def load_value_model(model_config: Mapping[str, Any], dtype: torch.dtype, reads: bool = True) -> ValueModel:
    """The critic that `critic.model` describes: the folder's backbone with a new head, on CPU. reads: as
    above.
    """
    return ValueModel(*_load(model_config, AutoModel, dtype, reads=reads))


def load_hf_config(model_config: Mapping[str, Any]) -> PretrainedConfig:
    """The model's configuration with `override_config` on top; clear errors for a bad folder or key. Imports
    `external_lib` first: it may be what registers the configuration's class.
    """
    if model_config.get("external_lib"):
        importlib.import_module(model_config["external_lib"])
    source = _source(model_config)
    try:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=model_config.get("trust_remote_code", False)
        )
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Model {source}: its configuration can't be read ({reason}).") from error
    for key, value in (model_config.get("override_config") or {}).items():
        if not hasattr(config, key):
            raise ValueError(
                f"model.override_config: {type(config).__name__} of {source} has no field {key!r}."
            )
        setattr(config, key, value)
    return config


def check_heads(model_config: Mapping[str, Any], num_sharing: int) -> None:
    """Raises ValueError if so many processes can't share the model's attention heads."""
    if num_sharing == 1:
        return
    num_heads = load_hf_config(model_config).get_text_config().num_attention_heads
    if num_heads % num_sharing:
        good = [size for size in range(2, num_heads + 1) if num_heads % size == 0]
        raise ValueError(
            f"Found ulysses_sequence_parallel_size={num_sharing}, but {model_config['path']} has {num_heads} "
            f"attention heads; expected a number that divides them: {', '.join(map(str, good))}."
        )


def _source(model_config: Mapping[str, Any]) -> str:
    """The local folder, or the name on the Hugging Face hub, that `model.path` stands for."""
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
    """Parameters of modules that are made inside of the block have no memory; buffers are as always."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is there already is being tied
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside of the block parameters on "meta" are a number on the CPU each: what PEFT puts beside a matrix,
    and draws at random, goes to the matrix's device.
    """
    slots = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    for module, name, parameter in slots:
        if parameter is not None and parameter.is_meta:
            one = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            module._parameters[name] = nn.Parameter(one, parameter.requires_grad)
    yield
    for module, name, parameter in slots:
        if parameter is not None and parameter.is_meta:
            parameter.requires_grad_(module.get_parameter(name).requires_grad)
            module._parameters[name] = parameter


def _empty(
    auto_class: Any, config: PretrainedConfig, folder: Path, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, Unread] | None:
    """The model with weights that are unread. None: the files have other names or shapes than the model, or
    there are more files than the model's.
    """
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if {path.name for path in folder.glob("*.safetensors")} != files:
        return None
    with parameters_on_meta():
        model = auto_class.from_config(config, **options)
    shapes = shapes_in(folder)
    names = {}
    if any(name in shapes for name, _ in model.named_buffers()):
        return None
    for name, parameter in model.named_parameters():
        both = name, f"{model.base_model_prefix}.{name}"  # a backbone's, in the folder of a policy
        found = [each for each in both if shapes.get(each) == tuple(parameter.shape)]
        if not found:
            return None
        names[name] = found[0]
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, Unread(folder, names)


def _load(
    model_config: Mapping[str, Any],
    auto_class: Any,
    dtype: torch.dtype,
    with_adapters: bool = True,
    reads: bool = True,
) -> tuple[PreTrainedModel, Adapters | None, Unread | None]:
    config = load_hf_config(model_config)
    source = _source(model_config)
    folder = Path(source)
    in_parts = any(folder.glob("*.safetensors")) if folder.is_dir() else False
    if folder.is_dir() and not in_parts and not any(folder.glob("*.bin")):
        raise ValueError(f"Model folder {source} has no weights; expected *.safetensors beside config.json.")
    options = {
        "dtype": dtype,
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": model_config.get("trust_remote_code", False),
    }
    empty = None if reads or not in_parts else _empty(auto_class, config, folder, options)
    model, unread = empty or (_whole(auto_class, config, source, options), None)
    for module in model.modules():  # chance must not enter the probability of a token
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
    """Lets a layer compute by `function`, with gradient checkpointing around it where that is on.

    Transformers has its own around the layer or inside its forward, depending on its version; it is switched
    off. Nothing is random in a layer, so checkpoints keep no state of generators. Hooks at each saved tensor
    cost the host milliseconds, so only an input without a gradient takes that way.
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


def _whole(
    auto_class: Any, config: PretrainedConfig, source: str, options: Mapping[str, Any]
) -> PreTrainedModel:
    """The model with its weights. ValueError: they are not those of the configuration."""
    model, report = auto_class.from_pretrained(source, config=config, output_loading_info=True, **options)
    if report["missing_keys"] or report["mismatched_keys"]:
        names = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
        raise ValueError(
            f"Model {source}: {len(names)} parameters have no weights or some of another "
            f"shape ({', '.join(names[:3])}, ...); config.json with override_config doesn't fit the weights."
        )
    loaded: PreTrainedModel = model
    return loaded
