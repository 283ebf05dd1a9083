"""The optimizer and the learning-rate schedule, from an `optim` block of the configuration.

The optimizer is AdamW, or Muon for the matrices of the layers with AdamW for everything else. The latter is
one optimizer with one state.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), with gradient G of W [out, in]:

    M <- momentum * M + G;   U = G + momentum * M;   O = NewtonSchulz(U), about the nearest orthogonal matrix
    W <- W - lr * (weight_decay * W + 0.2 * sqrt(max(out, in)) * O)

The factor before O is that of Moonlight (Liu et al. 2025, arXiv:2502.16982). It gives an update the size of
AdamW's, so that a learning rate and a weight decay that suit AdamW suit both.

With sharded weights, every process gathers a matrix's U, orthogonalises the whole matrix, and takes its own
shard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw as adamw_update
from torch.optim.lr_scheduler import LambdaLR

from verl.config.policy import Optim
from verl.workers.engine.lora import gather_full

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic polynomial in the post
NUM_ITERATIONS = 5
ADAMW_EPS = 1e-8


def hidden_matrices(backbone: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights [out, in] of a decoder's linear layers.

    Embeddings and norms are not among them.
    """
    weights = [module.weight for module in backbone.modules() if isinstance(module, nn.Linear)]
    return [w for w in weights if isinstance(w, nn.Parameter) and w.requires_grad]


def orthogonalised(update: Tensor) -> Tensor:
    """Return the update [out, in] with its singular values brought to about 1 (0.7 to 1.2), in its dtype.

    The function makes five steps of X <- a X + (b X X^T + c (X X^T)^2) X, starting from U / |U|. On CUDA it
    computes in bf16, as in the post.
    """
    a, b, c = COEFFICIENTS
    x = update.bfloat16() if update.is_cuda else update.float()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(update.dtype)


class MuonWithAdamW(torch.optim.Optimizer):
    """The optimizer that uses Muon for some parameters and AdamW for the others.

    Its state exists from the start (zeros).

    Args:
        parameters: all parameters that are trained.
        matrices: ids of the parameters [out, in] that Muon updates.
        optim: the `optim` block of the configuration.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], matrices: Collection[int], optim: Optim) -> None:
        lr = optim.lr
        betas = (optim.betas[0], optim.betas[1])
        adamw_lr = lr if optim.adamw_lr is None else optim.adamw_lr
        settings: list[dict[str, Any]] = [
            {"params": [], "lr": lr, "momentum": optim.momentum, "weight_decay": optim.weight_decay},
            {"params": [], "lr": adamw_lr, "betas": betas, "weight_decay": optim.weight_decay},
        ]
        for parameter in parameters:
            settings[id(parameter) not in matrices]["params"].append(parameter)
        super().__init__([group for group in settings if group["params"]], {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum_buffer": _zeros(p)} if "momentum" in group else adamw_state(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the loss is known
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if "momentum" in group:
                for parameter in parameters:
                    self._muon(parameter, group)
            elif parameters:
                self._adamw(parameters, group)

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        momentum = group["momentum"]
        assert gradient is not None
        average = self.state[parameter]["momentum_buffer"]
        average.mul_(momentum).add_(gradient)
        update = orthogonalised(gather_full(gradient.add(average, alpha=momentum)))
        if isinstance(parameter, DTensor):  # each process has the whole update, so nothing is sent
            mesh = parameter.device_mesh
            placements = parameter.placements
            update = distribute_tensor(update, mesh, placements, src_data_rank=None)
        size = 0.2 * math.sqrt(max(parameter.shape))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * size)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        averages, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        settings = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": ADAMW_EPS}
        settings |= {"fused": True, "amsgrad": False, "maximize": False}
        settings["beta1"], settings["beta2"] = group["betas"]
        adamw_update(parameters, gradients, averages, squares, [], steps, **settings)


def adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state before the first step, with the names that torch gives it."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": _zeros(parameter), "exp_avg_sq": _zeros(parameter)}


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: Optim, matrices: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer that `optim.name` asks for.

    It is AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), or Muon with AdamW. Its state exists from the
    start (zeros), so that a checkpoint written before the first step is complete.

    Args:
        parameters: the model's parameters. Those without `requires_grad` are left out.
        optim: the `optim` block of the configuration.
        matrices: the parameters that Muon is for (`hidden_matrices`).
    """
    trained = [p for p in parameters if p.requires_grad]
    if optim.name == "muon":
        return MuonWithAdamW(trained, {id(p) for p in matrices}, optim)
    optimizer = adamw(trained, optim)
    for p in trained:
        optimizer.state[p] = adamw_state(p)
    return optimizer


def adamw(parameters: Iterable[nn.Parameter], optim: Optim) -> torch.optim.AdamW:
    """Build the AdamW optimizer of an `optim` block, without any state yet."""
    lr = optim.lr
    betas = (optim.betas[0], optim.betas[1])
    decay = optim.weight_decay
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=decay, fused=True)


def lr_factor(step: int, num_warmup: int, num_total: int, style: str, min_ratio: float) -> float:
    """Return the share of the peak learning rate in update number `step` (from 0).

    During the linear warm-up the share is (step + 1) / num_warmup. The peak is thus reached in update
    num_warmup, and no update is wasted on a rate of 0. After the warm-up the share is 1 with the style
    `constant`. With `linear` and `cosine` it goes from 1 to min_ratio at num_total.
    """
    if step < num_warmup:
        return (step + 1) / num_warmup
    if style == "constant":
        return 1.0
    progress = min(1.0, (step - num_warmup) / max(1, num_total - num_warmup))
    remaining = 1.0 - progress if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_ratio + (1.0 - min_ratio) * remaining


def resume_schedule(scheduler: LambdaLR, state: Mapping[str, Any]) -> None:
    """Move a schedule to the step of another schedule's `state_dict`, with its own learning rates."""
    scheduler.load_state_dict({**state, "base_lrs": scheduler.base_lrs})
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates  # the rates that get_last_lr returns


def build_scheduler(optimizer: torch.optim.Optimizer, optim: Optim) -> LambdaLR:
    """Build the learning-rate schedule of the block.

    The schedule follows `warmup_style`, `lr_warmup_steps` or `lr_warmup_steps_ratio`, `min_lr_ratio` and
    `total_training_steps`. One step of the schedule is one training step (of update_actor or update_critic),
    not one mini-batch.

    Raises ValueError if the schedule needs the length of the run and `total_training_steps` is not positive.
    """
    num_warmup = optim.lr_warmup_steps
    num_total = optim.total_training_steps
    style = optim.warmup_style
    min_ratio = optim.min_lr_ratio or 0.0
    ratio = optim.lr_warmup_steps_ratio if num_warmup < 0 else 0.0
    if num_total <= 0 and (style != "constant" or ratio):
        raise ValueError(
            f"optim.total_training_steps: found {num_total}, expected the length of the run in steps, which "
            "lr_warmup_steps_ratio and the linear and cosine schedules are shares of."
        )
    num_warmup = num_warmup if num_warmup >= 0 else int(ratio * num_total)
    return LambdaLR(optimizer, lambda step: lr_factor(step, num_warmup, num_total, style, min_ratio))
