"""A Hugging Face causal LM with weights that come and go, and a cache per sequence.

`CausalModel` makes the model's code without its parameters (they stay on the meta device until `load`), takes
(name, tensor) pairs by reference where dtype and device agree, and runs one sequence at a time: it hands the
model back the cache that the model itself returned, of whatever kind that is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

# What models call their cache, in their output and among the arguments of forward.
_CACHE_NAMES = ("past_key_values", "cache_params", "state")
# Cache layers that take several new tokens at once. Recurrent ones (Mamba's, say) take one.
_EXTENSIBLE = (DynamicLayer, DynamicSlidingWindowLayer)
_Holders = dict[str, tuple[nn.Module, str]]


class HeldCache(NamedTuple):
    """A cache as the model returned it, under the name by which it wants it back."""

    name: str
    value: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in it."""
        return sum(tensor.nbytes for tensor in _tensors(self.value))

    def takes_several_tokens(self) -> bool:
        """False if only one token may follow at a time (recurrent states), or nothing is known of it."""
        return isinstance(self.value, Cache) and all(type(x) in _EXTENSIBLE for x in self.value.layers)


class Advanced(NamedTuple):
    """Float32 logits [vocab_size] after the last token, the cache of the whole sequence (None if the model
    keeps none: then each token costs the whole sequence), and how many tokens were computed."""

    logits: Tensor
    cache: HeldCache | None
    num_computed: int


class CausalModel:
    """One model on one device, dtype `dtype`; it has no weights until `load`."""

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
    ) -> None:
        self._dtype = dtype
        self._device = device
        config = copy.deepcopy(config)
        self._model = _without_parameters(config, dtype, device, trust_remote_code)
        self.name = type(self._model).__name__
        self.vocab_size: int = config.get_text_config().vocab_size
        self._holders = _holders(self._model)  # one entry per parameter, tied names together
        self._entry_of_name = {name: entry for entry, names in enumerate(self._holders) for name in names}
        buffers = {name for name, _ in self._model.named_buffers()}
        self._buffers = buffers & set(self._model.state_dict())
        arguments = inspect.signature(self._model.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in arguments
        self._takes_cache_position = "cache_position" in arguments
        self._own: dict[int, Tensor] = {}  # by entry; the others are tensors of the weights' owner
        self.loaded = False

    @torch.no_grad()  # not inference_mode: sharded weights are gathered in this loop, which it does not allow
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all parameters. ValueError for unknown, missing or wrongly shaped ones."""
        self.loaded = False
        taken: set[int] = set()
        unknown = []
        for name, tensor in weights:
            if name in self._buffers:
                self._model.get_buffer(name).copy_(tensor)
            elif name not in self._entry_of_name:
                unknown.append(name)
            else:
                self._take(self._entry_of_name[name], name, tensor.detach())
                taken.add(self._entry_of_name[name])
        missing = [next(iter(names)) for entry, names in enumerate(self._holders) if entry not in taken]
        if unknown or missing:
            raise ValueError(
                f"the weights don't fit {self.name}: {len(unknown)} unknown {unknown[:5]}, {len(missing)} "
                f"missing {missing[:5]}. Send (Hugging Face name, full tensor) pairs of the whole model"
            )
        self.loaded = True

    def release(self) -> int:
        """Drop every reference to weights; returns the bytes of those that were this object's own."""
        num_bytes = sum(tensor.nbytes for tensor in self._own.values())
        for holders in self._holders:
            module, attribute = next(iter(holders.values()))
            _assign(holders, module.get_parameter(attribute).to("meta"))
        self._own = {}
        self.loaded = False
        return num_bytes

    def advance(self, token_ids: list[int], num_cached: int, cache: HeldCache | None) -> Advanced:
        """Run a sequence from where its cache ends.

        Args:
            token_ids: the whole sequence so far; its first `num_cached` are in `cache` (None: nothing is).
        """
        if cache is not None and len(token_ids) - num_cached > 1 and not cache.takes_several_tokens():
            cache = None
        if cache is None:
            num_cached = 0
        arguments: dict[str, Any] = {"use_cache": True}
        if cache is not None:
            arguments[cache.name] = cache.value
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        if self._takes_cache_position:
            arguments["cache_position"] = torch.arange(num_cached, len(token_ids), device=self._device)
        new = torch.tensor([token_ids[num_cached:]], device=self._device)
        output = self._model(input_ids=new, **arguments)
        found = [HeldCache(name, output[name]) for name in _CACHE_NAMES if output.get(name) is not None]
        return Advanced(output.logits[0, -1].float(), found[0] if found else None, new.shape[1])

    def _take(self, entry: int, name: str, tensor: Tensor) -> None:
        holders = self._holders[entry]
        module, attribute = holders[name]
        shape = module.get_parameter(attribute).shape
        if tensor.shape != shape:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}; the model's config says {tuple(shape)}"
            )
        if tensor.dtype == self._dtype and tensor.device == self._device:
            self._own.pop(entry, None)
            _assign(holders, tensor)
        elif entry in self._own:
            self._own[entry].copy_(tensor)
        else:
            self._own[entry] = tensor.to(self._device, self._dtype)
            _assign(holders, self._own[entry])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Cache):
        for layer in value.layers:
            yield from _tensors(list(vars(layer).values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _without_parameters(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """The model with parameters on the meta device (so initialising them costs nothing) and real buffers."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # None: as it is
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(cast(Any, to_meta))  # may return one
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    finally:
        hook.remove()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model.eval()


def _holders(model: nn.Module) -> list[_Holders]:
    """Each parameter once: all its names, with the module and the attribute that hold it."""
    holders: dict[int, _Holders] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        holders.setdefault(id(parameter), {})[name] = (model.get_submodule(path), attribute)
    return list(holders.values())


def _assign(holders: _Holders, tensor: Tensor) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    for module, attribute in holders.values():
        setattr(module, attribute, parameter)
