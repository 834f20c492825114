"""Slots: dense key/value memory for many sequences at once, and the forward pass over them.

Active sequences always fill the first rows, so a decode step reads the memory through a view and copies nothing.
A finished sequence keeps its keys and values until the row is needed: the next prompt that begins with the same
tokens (another rollout of the group, the next turn of the conversation) continues from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from agl.errors import ConfigError
from agl_trainer.backends.transformers.arithmetic import FixedRows, rounded


class SlotCache(Cache):
    """What the model's attention layers see: writes go to the given rows and positions of the slots."""

    def __init__(self, slots: Slots) -> None:
        # No super().__init__(): the parent wants layer objects, we only answer `update`.
        self.layers = []
        self.slots = slots
        self.rows = torch.zeros(0, dtype=torch.long)
        self.positions = torch.zeros(0, dtype=torch.long)
        self.length = 0
        self.front = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values ``[B, H, Q, D]``; return those of the same rows up to the longest position."""
        keys, values = self.slots.keys[layer_idx], self.slots.values[layer_idx]
        rows = self.rows[:, None].expand_as(self.positions)
        # Under autocast the rotary embedding leaves keys in float32; attention would round them all the same.
        keys[rows, :, self.positions] = key_states.transpose(1, 2).to(keys.dtype)
        values[rows, :, self.positions] = value_states.transpose(1, 2).to(values.dtype)
        if self.front:
            count = len(self.rows)
            return keys[:count, :, : self.length], values[:count, :, : self.length]
        return keys[self.rows, :, : self.length], values[self.rows, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given explicitly, so the model need not derive them from a length."""
        return 0


class Slots:
    """Keys and values of up to ``count`` sequences, and what tokens they stand for."""

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.count = count
        self.tokens: list[np.ndarray] = [np.zeros(0, dtype=np.int64) for _ in range(count)]
        """Tokens whose keys and values each row holds."""
        self.used = [0] * count
        """When each row was last written, in forward passes: the oldest idle row is overwritten first."""
        self._clock = 0
        # transformers renamed the argument after 5.19; both are in use. An adapter around the model hides its names.
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        names = inspect.signature(plain.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        config = model.config
        self._heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = config.num_hidden_layers
        self.capacity = 0
        self.keys = self.values = torch.zeros(0)
        self.cache = SlotCache(self)

    def reserve(self, length: int) -> None:
        """Make room for sequences of this many tokens (one more position serves padding)."""
        if length + 1 <= self.capacity:
            return
        capacity = max(256, 1 << length.bit_length())
        shape = (self._layers, self.count, self._heads, capacity, self._size)
        for name in ("keys", "values"):
            grown = torch.zeros(shape, dtype=self._dtype(), device=self.model.device)
            old = getattr(self, name)
            if self.capacity:
                grown[:, :, :, : self.capacity] = old
            setattr(self, name, grown)
        self.capacity = capacity

    def _dtype(self) -> torch.dtype:
        device = self.model.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.model.dtype

    def forget(self) -> None:
        """Drop all reusable prefixes: the weights that made them are gone."""
        self.tokens = [np.zeros(0, dtype=np.int64) for _ in range(self.count)]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a == b:
            return
        length = max(len(self.tokens[a]), len(self.tokens[b]))
        for memory in (self.keys, self.values):
            first = memory[:, a, :, :length].clone()
            memory[:, a, :, :length] = memory[:, b, :, :length]
            memory[:, b, :, :length] = first
        self.tokens[a], self.tokens[b] = self.tokens[b], self.tokens[a]
        self.used[a], self.used[b] = self.used[b], self.used[a]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give ``target`` the first ``length`` tokens of ``source``."""
        if source != target:
            for memory in (self.keys, self.values):
                memory[:, target, :, :length] = memory[:, source, :, :length]
        self.tokens[target] = self.tokens[source][:length]

    def forward(self, rows: Sequence[int], token_ids: Sequence[np.ndarray]) -> torch.Tensor:
        """Append tokens to rows and return the logits after the last token of each (``[B, V]``, float32 or better).

        Shorter inputs are padded on the left; padding writes to the spare last position, which nothing reads.
        """
        starts = [len(self.tokens[row]) for row in rows]
        ends = [start + len(new) for start, new in zip(starts, token_ids, strict=True)]
        self.reserve(max(ends))
        width = max(len(new) for new in token_ids)
        spare = self.capacity - 1
        ids = np.zeros((len(rows), width), dtype=np.int64)
        places = np.full((len(rows), width), spare, dtype=np.int64)
        for index, (new, start, end) in enumerate(zip(token_ids, starts, ends, strict=True)):
            ids[index, width - len(new) :] = new
            places[index, width - len(new) :] = np.arange(start, end)
        exact = self.model.device.type == "cpu" and self._dtype() in (torch.float32, torch.float64)
        with FixedRows() if exact else nullcontext():
            logits = self._run(rows, ids, places, rounded(max(ends)) if exact else max(ends))
        self._clock += 1
        for row, new in zip(rows, token_ids, strict=True):
            self.tokens[row] = np.concatenate([self.tokens[row], new])
            self.used[row] = self._clock
        return logits

    def _run(self, rows: Sequence[int], ids: np.ndarray, places: np.ndarray, length: int) -> torch.Tensor:
        device = self.model.device
        where = torch.from_numpy(places).to(device)
        cache = self.cache
        cache.rows = torch.tensor(list(rows), device=device)
        cache.positions, cache.length = where, length
        cache.front = list(rows) == list(range(len(rows)))
        # A token sees every position up to its own. Padding sees everything; its output is not read.
        mask = torch.arange(length, device=device)[None, None, None, :] <= where[:, None, :, None]
        logits = self.model(
            input_ids=torch.from_numpy(ids).to(device),
            position_ids=where.where(where < self.capacity - 1, 0),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        ).logits[:, -1]
        return logits if logits.dtype == torch.float64 else logits.float()


def refuse_unsupported(config: Any, max_length: int) -> None:
    """The slots hold plain full attention.

    Raises:
        ConfigError: the model has layers of another kind (sliding window, linear attention, state space).
    """
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_length:
        raise ConfigError(
            f"the embedded backend serves models with full attention only; {config.model_type!r} looks back no more "
            f"than sliding_window={window!r} tokens. Set max_length={window} or less, or serve it with backend='vllm'"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if other := kinds - {"full_attention"}:
        raise ConfigError(
            f"the embedded backend serves models with full attention only; {config.model_type!r} has "
            f"{sorted(other)!r}. Serve this model with backend='vllm'"
        )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
