"""Logprobs and entropies from last states, without the logits: only a tile of them exists at any time.

The vocabulary is walked slice by slice. In the forward pass each slice adds to a running maximum and sum (online
softmax, Milakov and Gimelshein, arXiv 1805.02867). The backward pass makes each slice again, now with the right
normaliser, so a slice of the head's gradient is written once and whole (Cut Cross-Entropy, arXiv 2411.09009, without
its approximations). A frozen head, as under LoRA, needs no second walk: the gradient of the states is gathered in the
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS = 2048
"""States that are walked together."""
TILE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits that exist at one time, by device: on a CPU they should stay in its cache."""


def selected_logprobs(
    head: nn.Module,
    states: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    entropies: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``log softmax(head(state) / temperature)[target]``, and the entropies of these distributions when asked.

    The head computes in its own precision, or in autocast's; everything after it in float32, or in float64.

    Args:
        head: hidden size to vocabulary V. A plain linear layer is walked in slices; anything else, such as a head with
            an adapter, is called on few states at a time.
        states: ``[N, H]``.
        targets: ``[N]`` token ids.
        temperatures: ``[N]``.
        entropies: whether to return those, ``[N]``, too.
    """
    tile = TILE.get(states.device.type, TILE["cuda"])
    plain = type(head) is nn.Linear and not (
        head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook")
    )
    size = ROWS if plain else max(1, tile // getattr(head, "out_features", states.shape[-1]))
    parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for chunk in zip(states.split(size), targets.split(size), temperatures.split(size), strict=True):
        if isinstance(head, nn.Linear) and plain:
            width = max(1, tile // len(chunk[0]))
            parts.append(_Walk.apply(*chunk, head.weight, head.bias, width, entropies))  # pyright: ignore[reportArgumentType]
        else:
            parts.append(checkpoint(_called, head, *chunk, entropies, use_reentrant=False))  # pyright: ignore[reportArgumentType]
    logprobs = [part[0] for part in parts]
    spread = [part[1] for part in parts if part[1] is not None]
    return torch.cat(logprobs), torch.cat(spread) if entropies else None


def _called(
    head: nn.Module, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, entropies: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = (logits / temperatures.to(logits.dtype)[:, None]).log_softmax(-1)
    spread = -(logprobs.exp() * logprobs).sum(-1) if entropies else None
    return logprobs.gather(-1, targets[:, None])[:, 0], spread


class _Walk(torch.autograd.Function):
    """One walk over the vocabulary for up to `ROWS` states."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        width: int,
        entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        walk = _Slices(states.to(dtype), targets, temperatures, weight, bias, width)
        top = walk.states.new_full((len(states),), float("-inf"), dtype=walk.exact)
        total, picked, mean = (torch.zeros_like(top) for _ in range(3))
        head_is_frozen = not any(ctx.needs_input_grad[3:5])
        gathers = ctx.needs_input_grad[0] and head_is_frozen and not entropies
        gathered = torch.zeros_like(states, dtype=walk.exact) if gathers else None
        with torch.autocast(device, enabled=False):
            for part, logits, place, inside in walk:
                torch.where(inside, logits.gather(1, place[:, None])[:, 0], picked, out=picked)
                higher = torch.maximum(top, logits.amax(1))
                shrink = (top - higher).exp_()
                top = higher
                if entropies:
                    odds = (logits - top[:, None]).exp_()
                    mean = mean.mul_(shrink).add_(logits.mul_(odds).sum(1))
                else:
                    odds = logits.sub_(top[:, None]).exp_()
                total.mul_(shrink).add_(odds.sum(1))
                if gathered is not None:
                    gathered.mul_(shrink[:, None]).add_(odds.to(dtype) @ part)
        logsum = top + total.log()
        spread = logsum - mean / total if entropies else None
        if gathered is not None:  # the slope of each logprob along its state
            gathered.div_(-total[:, None]).add_(weight[targets].to(dtype))
            gathered.div_(temperatures.to(walk.exact)[:, None])
        ctx.save_for_backward(states, targets, temperatures, weight, bias, logsum, spread, gathered)
        ctx.width, ctx.dtype = width, dtype
        return picked - logsum, spread

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        states, targets, temperatures, weight, bias, logsum, spread, gathered = ctx.saved_tensors
        slope, of_spread = slopes[0], slopes[1] if spread is not None else None
        assert slope is not None
        if gathered is not None:
            return (gathered * slope[:, None]).to(states.dtype), *(None,) * 6
        walk = _Slices(states.to(ctx.dtype), targets, temperatures, weight, bias, ctx.width)
        needs_states, _, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_states = torch.zeros_like(states, dtype=walk.exact) if needs_states else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        of_bias = torch.empty_like(bias) if needs_bias else None
        scaled = slope / walk.temperatures
        start = 0
        with torch.autocast(states.device.type, enabled=False):
            for part, logits, place, inside in walk:
                logprobs = logits.sub_(logsum[:, None])
                if of_spread is None:
                    flow = logprobs.exp_().mul_(-scaled[:, None])
                else:
                    assert spread is not None
                    factor = (logprobs + spread[:, None]).mul_(of_spread[:, None]).add_(slope[:, None])
                    flow = logprobs.exp_().mul_(factor).div_(-walk.temperatures[:, None])
                flow.scatter_add_(1, place[:, None], torch.where(inside, scaled, 0.0)[:, None])
                stop = start + len(part)
                if of_bias is not None:
                    of_bias[start:stop] = flow.sum(0)
                flow = flow.to(ctx.dtype)
                if of_states is not None:
                    of_states += flow @ part
                if of_weight is not None:
                    of_weight[start:stop] = flow.T @ walk.states
                start = stop
        return (
            of_states if of_states is None else of_states.to(states.dtype),
            None,
            None,
            of_weight,
            of_bias,
            None,
            None,
        )


class _Slices:
    """The head's slices, each with the logits of all states over their temperatures."""

    def __init__(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        width: int,
    ) -> None:
        self.states, self.targets, self.weight, self.bias, self.width = states, targets, weight, bias, width
        self.exact = torch.promote_types(states.dtype, torch.float32)
        self.temperatures = temperatures.to(self.exact)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Slice of the head ``[W, H]``, logits ``[N, W]``, where in it each target is, and whether it is there."""
        warm = bool((self.temperatures != 1).any())
        for start in range(0, len(self.weight), self.width):
            part = self.weight[start : start + self.width].to(self.states.dtype)
            logits = self.states @ part.T
            if self.bias is not None:
                logits += self.bias[start : start + self.width].to(logits.dtype)
            logits = logits.to(self.exact)
            if warm:
                logits.div_(self.temperatures[:, None])
            place = (self.targets - start).clamp_(0, len(part) - 1)
            yield part, logits, place, place + start == self.targets
