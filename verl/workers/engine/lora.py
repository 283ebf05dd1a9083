"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) through PEFT: y = W x + (lora_alpha / r) B A x, W frozen.

    load_policy -> add_adapters   A [r, in] and B [out, r] beside W [out, in]; they alone have gradients
    TrainEngine.weights           W + (lora_alpha / r) B A under W's name: for rollouts and saved models
    Reference                     the model with its adapters off
    save_adapter                  a PEFT folder: adapter_config.json, adapter_model.safetensors

Adapters are kept in float32, whatever the base's dtype. PEFT is imported only when a run has adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.utils.extras import check_packages

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLinear

ADAPTER = "default"  # PEFT's name for the one adapter
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."  # begins the names in PEFT's files


def wants_adapters(model_config: Mapping[str, Any]) -> bool:
    """Return whether the `model` block asks for LoRA, by a rank or by an adapter to resume from."""
    return bool(model_config.get("lora_rank")) or model_config.get("lora_adapter_path") is not None


def gather_full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one, gathered by all ranks together, or a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Adapters:
    """The adapters of one model.

    Attributes:
        config: PEFT's configuration of the adapters.
        layers: Hugging Face name of an adapted module (`model.layers.0.mlp.up_proj`) -> PEFT's layer.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig):
        from peft.tuners.lora import Linear

        self.config = config
        self.layers: dict[str, LoraLinear] = {
            name: module for name, module in model.named_modules() if isinstance(module, Linear)
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained tensors, sharded or not, by name.

        The names are `<module>.lora_A.weight` and `<module>.lora_B.weight`.
        """
        return {
            f"{name}.{kind}.weight": layer.get_parameter(f"{kind}.{ADAPTER}.weight")
            for name, layer in self.layers.items()
            for kind in ("lora_A", "lora_B")
        }

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Make the model its base inside the block."""
        # PEFT's own enable_adapters also changes the adapters' requires_grad, which sharding would notice.
        for layer in self.layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False

    def merged(self, name: str, base: Tensor) -> Tensor:
        """Return W + (alpha / r) B A of a module as a new tensor in the dtype of `base`.

        The sum is computed in float32. All ranks call it together.

        Args:
            name: the module's name.
            base: its whole W [out, in].
        """
        layer = self.layers[name]
        a, b = (
            gather_full(layer.get_parameter(f"{kind}.{ADAPTER}.weight").detach())
            for kind in ("lora_A", "lora_B")
        )
        return torch.addmm(base.float(), b, a, alpha=layer.scaling[ADAPTER]).to(base.dtype)


def plain_parameters(
    model: PreTrainedModel, adapters: Adapters | None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of each parameter, tied ones once.

    Adapters are merged into copies. Other tensors are cast to `dtype` before they are gathered. All ranks
    iterate together. Tensors that need no merging, casting or gathering are the model's own.
    """
    for name, parameter in model.named_parameters():
        if adapters is not None and (".lora_A." in name or ".lora_B." in name):
            continue
        tensor = parameter.detach()
        module, _, kind = name.rpartition(".")
        is_adapted = adapters is not None and module.endswith(".base_layer")
        module = module.removesuffix(".base_layer") if is_adapted else module
        if adapters is not None and is_adapted and kind == "weight":
            tensor = adapters.merged(module, gather_full(tensor))
        tensor = gather_full(tensor if dtype is None else tensor.to(dtype))
        yield f"{module}.{kind}" if module else kind, tensor


# ------------------------------------------------------------------------------------------------ making


def adapter_config(model_config: Mapping[str, Any]) -> LoraConfig:
    """Return PEFT's configuration: that of the folder `lora_adapter_path`, or one made from lora_rank etc.

    Raises:
        ValueError: PEFT is missing, the folder holds no plain LoRA adapter, or its rank differs from
            lora_rank.
    """
    check_packages("model.lora_rank", "peft")
    from peft import LoraConfig

    rank = model_config.get("lora_rank", 0)
    path = model_config.get("lora_adapter_path")
    if path is None:
        return LoraConfig(
            r=rank,
            lora_alpha=model_config.get("lora_alpha", 16),
            target_modules=_module_names(model_config.get("target_modules", "all-linear")),
            task_type="CAUSAL_LM",
        )
    folder = Path(path).expanduser()
    check_adapter_folder("model.lora_adapter_path", folder)
    config = LoraConfig.from_pretrained(str(folder))
    if rank and rank != config.r:
        raise ValueError(
            f"model.lora_rank={rank}, but the adapter in {folder} has rank {config.r}; expected the same, or "
            "lora_rank=0."
        )
    if isinstance(config.init_lora_weights, str):
        raise ValueError(
            f"{folder}: the adapter was made with init_lora_weights={config.init_lora_weights}, which "
            "changes the base model; expected a plain LoRA adapter."
        )
    config.inference_mode = False
    config.lora_dropout = 0.0  # chance must not influence a token's probability
    return config


def _module_names(value: Any) -> Any:
    """Return the names as PEFT takes them: "all-linear", a list, or a regular expression of whole paths."""
    if isinstance(value, str) and not value.isidentifier():
        return value
    return [value] if isinstance(value, str) else list(value)


def check_adapter_folder(key: str, folder: Path) -> None:
    """Check that `folder`, the value of `key`, is the PEFT folder of a LoRA adapter.

    Raises ValueError if it is not.
    """
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{key}: {folder} has no {' and no '.join(missing)}; expected the folder of a PEFT adapter, such "
            "as <run>/global_step_N/actor/adapter."
        )
    try:
        kind = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{key}: {folder / CONFIG_FILE} can't be read ({error!r}).") from error
    if kind != "LORA":
        raise ValueError(f"{key}: {folder} holds an adapter of type {kind}; expected LORA.")


def add_adapters(model: PreTrainedModel, config: LoraConfig, source: str) -> Adapters:
    """Put adapters beside the matrices that `config` names, and freeze everything else.

    B starts as 0. A is drawn with a fixed seed, so that it is the same in every process and run.

    Args:
        model: the model.
        config: PEFT's configuration of the adapters.
        source: the name of the model's folder, for error messages and for PEFT's configuration.

    Raises:
        ValueError: the model has no such modules, or the adapters are not plain LoRA on linear layers.
    """
    from peft import inject_adapter_in_model

    wanted = config.target_modules  # PEFT replaces "all-linear" by the modules' names
    wanted = [] if wanted is None or isinstance(wanted, str) else sorted(wanted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise ValueError(f"LoRA on {source}: {error} {_advice(model)}") from error
    config.base_model_name_or_path = source
    adapters = Adapters(model, config)
    _check_layers(model, adapters, wanted, source)
    for parameter in adapters.parameters().values():
        parameter.data = parameter.data.float()
    return adapters


def load_adapter(adapters: Adapters, path: str | Path) -> None:
    """Fill A and B from a PEFT folder.

    Raises ValueError if its file can't be read, or has other tensors than `adapters`.
    """
    file = Path(path).expanduser() / WEIGHTS_FILE
    try:
        saved = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"{file} can't be read ({error}).") from error
    parameters = adapters.parameters()
    wrong = sorted(parameters.keys() ^ saved.keys()) or [
        f"{name} {list(saved[name].shape)} for {list(p.shape)}"
        for name, p in parameters.items()
        if saved[name].shape != p.shape
    ]
    if wrong:
        raise ValueError(
            f"{file} doesn't fit the model: {len(wrong)} tensors are missing, unknown or of another shape "
            f"({', '.join(wrong[:3])}, ...); expected an adapter of this base model."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def save_adapter(adapters: Adapters, folder: Path, writes: bool) -> None:
    """Write a PEFT folder from the rank where `writes` is True; all ranks gather the tensors together."""
    tensors = {
        f"{_PEFT_PREFIX}{name}": gather_full(p.detach()).cpu().contiguous()
        for name, p in adapters.parameters().items()
    }
    if writes:
        adapters.config.save_pretrained(str(folder))
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _check_layers(model: PreTrainedModel, adapters: Adapters, wanted: list[str], source: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    unmatched = [n for n in wanted if not any(f".{layer}".endswith(f".{n}") for layer in adapters.layers)]
    if unmatched:
        raise ValueError(
            f"LoRA on {source}: no linear layer is named {', '.join(unmatched)}. {_advice(model)}"
        )
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        layer = adapters.layers.get(name)
        is_plain = layer is not None and not (layer.fan_in_fan_out or layer.lora_variant)
        if not is_plain or module is head or (layer is not None and any(layer.lora_bias.values())):
            raise ValueError(
                f"LoRA on {source}: {name} would get an adapter beyond plain LoRA, or is no linear layer of "
                f"the decoder; expected A and B on linear layers. {_advice(model)}"
            )
    trained = [n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n]
    if trained:
        raise ValueError(
            f"LoRA on {source}: the adapter also trains {', '.join(trained[:3])}; expected A and B alone "
            "(bias=none, no modules_to_save)."
        )


def _advice(model: nn.Module) -> str:
    names = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }
    return (
        f"Set target_modules to all-linear or to some of: {', '.join(sorted(names - {'lm_head'})) or 'none'}."
    )
