"""Arithmetic that does not depend on who shares the batch, so that a rollout run again after a crash is the same.

A matrix product chooses its kernel, and with it the order of its sums, by its shape. Continuous batching changes the
shape with every request that joins or leaves, and logprobs with it in their last bits. On the CPU in float32 every row
is therefore computed as if it stood in a block of `BLOCK` rows, whatever the company, the chunk of the prefill or the
reuse of a prefix. To really multiply such blocks one by one takes twice as long as one product over all rows, and most
shapes give the same bits both ways. Which do is found out by trial, once for each shape: a shape chooses its kernel
without a look at the numbers. How many keys attention reads is
rounded up, see `KEYS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BLOCK = 32
"""Rows; also how many queries the attention kernel multiplies at once, or a multiple."""
ROUND = 16
"""Rows are filled up to a multiple of this. Fewer kernels come into play, and fewer trials."""
KEYS, FEW_KEYS = 256, 64
"""Masked keys add exact zeros, but the kernels split long sums at places that depend on their length: keys are read up
to a multiple of the first number, and of the second where that is less."""


class FixedRows(TorchFunctionMode):
    """Inside, a row's result does not depend on how many others there are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute matrix products and attention our way; leave everything else as it is."""
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def rounded(keys: int) -> int:
    """How many keys attention is to read where it needs this many."""
    return keys + -keys % (KEYS if keys > KEYS else FEW_KEYS)


_whole: dict[tuple[Any, ...], bool] = {}
"""Whether one product over all rows gives the bits of blocks, by shape."""


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = input.reshape(-1, input.shape[-1])
    count = rows.shape[0]
    if missing := -count % ROUND:
        rows = functional.pad(rows, (0, 0, 0, missing))
    shape = (count + missing, *weight.shape, bias is None, input.dtype, torch.get_num_threads())
    if _whole.get(shape):
        output = functional.linear(rows, weight, bias)
    else:
        blocks = functional.pad(rows, (0, 0, 0, -rows.shape[0] % BLOCK)).split(BLOCK)
        output = torch.cat([functional.linear(block, weight, bias) for block in blocks])[: rows.shape[0]]
        if shape not in _whole:
            _whole[shape] = torch.equal(functional.linear(rows, weight, bias), output)
    return output[:count].view(*input.shape[:-1], -1)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> torch.Tensor:
    """The kernel takes queries in blocks; a last one of very few rows would be summed otherwise."""
    rows = query.shape[-2]
    missing = max(0, _fewest(query.shape[-1], query.dtype) - rows % BLOCK) if rows % BLOCK else 0
    if missing:
        query = functional.pad(query, (0, 0, 0, missing))
        mask = others["attn_mask"]
        if mask.shape[-2] > 1:
            others["attn_mask"] = functional.pad(mask, (0, 0, 0, missing), value=True)
    return functional.scaled_dot_product_attention(query, key, value, **others)[..., :rows, :]


@functools.cache
def _fewest(size: int, dtype: torch.dtype) -> int:
    """From how many queries on a block gives each the bits that it has in a full one, for heads of this size."""
    numbers = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, BLOCK, size, generator=numbers, dtype=dtype)
    key, value = torch.randn(2, 1, 1, 4 * KEYS, size, generator=numbers, dtype=dtype)
    mask = torch.ones(1, 1, 1, 4 * KEYS, dtype=torch.bool)
    full = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    fewest = BLOCK
    while fewest > 1:
        part = functional.scaled_dot_product_attention(query[:, :, : fewest - 1], key, value, attn_mask=mask)
        if not torch.equal(part, full[:, :, : fewest - 1]):
            break
        fewest -= 1
    return fewest
