"""Arithmetic that does not depend on who shares the batch, so that a rollout run again after a crash is the same.

A matrix product chooses its kernel, and with it the order of its sums, by its shape. Continuous batching changes the
shape with every request that joins or leaves, and logprobs with it in their last bits. On the CPU in float32 two
measures make them equal to the last bit, whatever the company, the chunk of the prefill or the reuse of a prefix:
linear layers multiply blocks of exactly `ROWS` rows, and attention multiplies no few queries alone and reads keys up to
a multiple of `KEYS`. The numbers were found by trial with MKL; tests hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROWS = 32
"""More would waste work when few sequences run; fewer would slow down prefill."""
KEYS = 256
"""Masked keys add exact zeros, but the kernels split long sums at places that depend on their length."""

BLOCK, FEWEST = 32, 8
"""Rows of queries that the attention kernel multiplies at once; and how many its last block needs at the least."""


class FixedRows(TorchFunctionMode):
    """Inside, a row's result does not depend on how many others there are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take the matrix products apart; leave everything else as it is."""
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = input.reshape(-1, input.shape[-1])
    missing = -len(rows) % ROWS
    blocks = functional.pad(rows, (0, 0, 0, missing)).split(ROWS)
    outputs = [functional.linear(block, weight, bias) for block in blocks]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[: len(rows)].reshape(*input.shape[:-1], -1)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> torch.Tensor:
    """The kernel takes queries in blocks of `BLOCK` or a multiple; a last one of few rows would be summed otherwise."""
    rows = query.shape[-2]
    missing = max(0, FEWEST - rows % BLOCK) if rows % BLOCK else 0
    if missing:
        query = functional.pad(query, (0, 0, 0, missing))
        mask = others["attn_mask"]
        if mask.shape[-2] > 1:
            others["attn_mask"] = functional.pad(mask, (0, 0, 0, missing), value=True)
    return functional.scaled_dot_product_attention(query, key, value, **others)[..., :rows, :]
