"""Gradients that add up in CPU memory, so that the device holds them in a step's last backward pass only.

    all micro-batches but the last: each gradient, once it is whole -> CPU, added to what is there
    the last one:                   gradients stay on the device, and the sums are added to them

Between micro-batches, and beside a forward pass's activations, the device then holds none. The price is a
copy of every gradient to the CPU in each micro-batch but the last.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class HostGradients:
    """The gradients of some parameters (those with requires_grad); sharded ones rank by rank."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters = [p for p in parameters if p.requires_grad]
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._takes = False
        for parameter in self._parameters:
            if not isinstance(parameter, DTensor):  # sharding sets gradients by itself: see `after_backward`
                parameter.register_post_accumulate_grad_hook(self._take)

    def before_backward(self, is_last: bool) -> None:
        """is_last: this backward pass is the last one before the optimizer steps."""
        self._takes = not is_last

    def after_backward(self) -> None:
        """Takes what is left on the device, or adds the sums to it."""
        if self._takes:
            for parameter in self._parameters:
                self._take(parameter)
            return
        for parameter, total in self._sums.items():
            gradient = total.to(parameter.device)
            if isinstance(parameter, DTensor):
                gradient = DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._sums.clear()

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if not self._takes or parameter.grad is None:
            return
        gradient, parameter.grad = parameter.grad, None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        total = self._sums.get(parameter)
        self._sums[parameter] = local.cpu() if total is None else total.add_(local.cpu())
