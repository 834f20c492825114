"""Attention over lines of rows and prefix trees: a token sees itself and the earlier ones in whose span it stands.

``ends`` says it all: query q sees key k exactly when ``k <= q <= ends[k]`` (`agl_trainer.batch.pack`).

On the CPU a line falls into *runs*, stretches without a fork, and *links*, from the queries behind a fork to the keys
they share. Each is one call of PyTorch's flash kernel: causal within a run, without any mask over a link. The parts of
a query are merged by their log-sum-exps, exactly (FlashAttention, arXiv 2205.14135, §3.1; Ring Attention, 2310.01889).
The kernel's backward pass, given the merged output and log-sum-exp, yields each part's exact share of the gradient.
On CUDA it is FlexAttention with a block mask made of ``ends``; elsewhere a dense mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

_FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FLASH_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def span_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Attention of every token to those that may be seen.

    Args:
        query: ``[B, H, L, D]``.
        key: ``[B, K, L, D]``; H is a multiple of K.
        value: ``[B, K, L, D]``.
        ends: ``[B, L]``, the last place of the line that sees each token.
        scaling: of the scores; None for ``1 / sqrt(D)``.

    Returns:
        ``[B, L, H, D]``.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as autocast does for PyTorch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if device == "cpu" and _FLASH is not None and key.shape[-1] == value.shape[-1]:
        return by_runs(query, key, value, ends, scale)
    if device == "cuda":
        return by_blocks(query, key, value, ends, scale)
    return by_mask(query, key, value, ends, scale)


# ------------------------------------------------------------------------------------------------ CPU: runs, links


class Plan(NamedTuple):
    """What to compute for some lines that are laid end to end."""

    runs: list[tuple[int, int, int]]
    """First place, length and number of neighbouring runs of equal length; each is causal."""
    links: list[tuple[int, int, int, int]]
    """``(a, b, c, d)``: the queries at ``a..b`` see all keys at ``c..d``."""


@lru_cache(maxsize=16)  # every layer asks for the same lines, and the backward pass with recomputation once more
def plan(ends: bytes, width: int) -> Plan:
    """Runs and links.

    Args:
        ends: int64 of ``[B, L]``.
        width: L.
    """
    last = np.frombuffer(ends, dtype=np.int64)
    place = np.arange(len(last))
    last = last + place // width * width  # lines end to end: the span of none reaches into the next
    starts = [0, *(np.flatnonzero(last[:-1] < place[1:]) + 1).tolist()]  # where the token before is not seen
    stops = [*starts[1:], len(last)]
    runs: list[tuple[int, int, int]] = []
    links: list[tuple[int, int, int, int]] = []
    for start, stop in zip(starts, stops, strict=True):
        first, length, count = runs[-1] if runs else (0, 0, 0)
        if stop - start == length:
            runs[-1] = (first, length, count + 1)
        else:
            runs.append((start, stop - start, 1))
        # Along a run spans only shrink. Where one does, a fork lies behind: others see the run up to here.
        forks = (np.flatnonzero(last[start : stop - 1] > last[start + 1 : stop]) + start).tolist()
        links += [(int(last[fork + 1]) + 1, int(last[fork]) + 1, start, fork + 1) for fork in forks]
    return Plan(runs, links)


def by_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    """The CPU's way."""
    batch, heads, length, size = query.shape
    groups = key.shape[1]

    def flat(x: torch.Tensor) -> torch.Tensor:  # [K, H / K or 1, B * L, D]
        rows = x.transpose(0, 1).reshape(x.shape[1], batch * length, size)
        return rows.unflatten(0, (groups, -1))

    work = plan(ends.numpy().tobytes(), length)
    output: Any = _ByRuns.apply(flat(query), flat(key), flat(value), work, scale)
    return output.view(batch, length, heads, size)


def _cut(x: torch.Tensor, start: int, length: int, count: int) -> torch.Tensor:
    """``count`` stretches as a batch: ``[K, G, T, ...]`` to ``[count * K, G, length, ...]``; one is a view."""
    return x[:, :, start : start + length * count].unflatten(2, (count, length)).movedim(2, 0).flatten(0, 1)


def _place(x: torch.Tensor, start: int, length: int, count: int, part: torch.Tensor) -> torch.Tensor:
    """The inverse: where such stretches stand in x, and ``part`` in the same shape."""
    where = x[:, :, start : start + length * count].unflatten(2, (count, length))
    return where.copy_(part.unflatten(0, (count, -1)).movedim(0, 2))


class _ByRuns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, work: Plan, scale: float
    ) -> torch.Tensor:
        groups, shared, length, size = query.shape
        exact = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
        memory = query.new_empty((length, groups, shared, size), dtype=exact if work.links else query.dtype)
        output = memory.permute(1, 2, 0, 3)
        logsum = query.new_empty((groups, shared, length), dtype=exact)
        for run in work.runs:
            q, k, v = (_cut(x, *run) for x in (query, key, value))
            part, its_logsum = _FLASH(q, k.expand(q.shape), v.expand(q.shape), 0.0, True, scale=scale)
            _place(output, *run, part)
            _place(logsum, *run, its_logsum)
        for a, b, c, d in work.links:
            q = query[:, :, a:b]
            k, v = (x[:, :, c:d].expand(-1, shared, -1, -1) for x in (key, value))
            part, its_logsum = _FLASH(q, k, v, 0.0, False, scale=scale)
            merged = torch.logaddexp(logsum[:, :, a:b], its_logsum)
            output[:, :, a:b].mul_((logsum[:, :, a:b] - merged).exp_()[..., None])
            output[:, :, a:b].addcmul_(part.to(exact), (its_logsum - merged).exp_()[..., None])
            logsum[:, :, a:b] = merged
        memory = memory.to(query.dtype)
        ctx.save_for_backward(query, key, value, memory, logsum)
        ctx.work, ctx.scale = work, scale
        return memory

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, memory, logsum = ctx.saved_tensors
        dtype = query.dtype
        # The kernel's backward pass in half precision is slower than in float32, and less exact.
        query, key, value, output, gradient = (
            x.to(logsum.dtype)
            for x in (query, key, value, memory.permute(1, 2, 0, 3), gradients[0].permute(1, 2, 0, 3))
        )
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))

        def part(cut: Any, keys: Any, causal: bool) -> Any:
            q, o, g, s = (cut(x) for x in (query, output, gradient, logsum))
            k, v = (keys(x) for x in (key, value))
            wide = (*q.shape[:2], *k.shape[2:])
            return _FLASH_BACKWARD(g, q, k.expand(wide), v.expand(wide), o, s, 0.0, causal, scale=ctx.scale)

        for run in ctx.work.runs:
            q, k, v = part(lambda x, run=run: _cut(x, *run), lambda x, run=run: _cut(x, *run), True)
            _place(of_query, *run, part=q)
            _place(of_key, *run, part=k.sum(1, keepdim=True))
            _place(of_value, *run, part=v.sum(1, keepdim=True))
        for a, b, c, d in ctx.work.links:
            q, k, v = part(lambda x, a=a, b=b: x[:, :, a:b], lambda x, c=c, d=d: x[:, :, c:d], False)
            of_query[:, :, a:b] += q
            of_key[:, :, c:d] += k.sum(1, keepdim=True)
            of_value[:, :, c:d] += v.sum(1, keepdim=True)
        return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype), None, None


# ----------------------------------------------------------------------------------------------- other devices

_block_masks: Any = WeakTensorKeyDictionary()
_compiled: Any = None


def by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    """FlexAttention: blocks of 128 by 128 that nobody may see are not computed."""
    global _compiled
    if query.device.type == "cuda" and _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=True)
    attend = _compiled if query.device.type == "cuda" else flex_attention
    output: Any = attend(query, key, value, block_mask=block_mask(ends), scale=scale, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


def block_mask(ends: torch.Tensor) -> BlockMask:
    """One for all layers of a forward pass."""
    base = ends if ends._base is None else ends._base
    if base not in _block_masks:

        def seen(line: Any, head: Any, q: Any, k: Any) -> Any:
            return (k <= q) & (q <= ends[line, k])

        batch, length = ends.shape
        _block_masks[base] = create_block_mask(seen, batch, None, length, length, device=str(ends.device))
    return _block_masks[base]


def visibility(ends: torch.Tensor) -> torch.Tensor:
    """``[B, 1, L, L]``: a token sees itself and those earlier ones whose span it stands in."""
    place = torch.arange(ends.shape[1], device=ends.device)
    return ((place[:, None] >= place) & (place[:, None] <= ends[:, None, :]))[:, None]


def by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    """The plainest way, and what the others are compared with."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visibility(ends), scale=scale
    )
    return output.transpose(1, 2).contiguous()
