"""Attention of the engine and of the learner, each without work that is thrown away.

*Engine.* With grouped-query attention transformers' own SDPA path first repeats every key and value for each query
head. Over the slots of the engine that copy costs more than all the rest of a decode step (64 sequences of 400 tokens
on two cores: 4.5 s a step with it, 0.3 s without). Here the query heads of a group are laid side by side instead.

*Learner.* Its lines hold many rows, or a prefix tree (`agl_trainer.batch.pack`). A mask of L² booleans would say who
sees whom, and most of it would be computed in vain. Instead the ``ends`` of the tokens travel in the mask's place, L
integers of the shape ``[B, 1, 1, L]``, and `agl_trainer.spans` computes only what they allow.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch

from agl_trainer.spans import span_attention

log = logging.getLogger(__name__)

NAME = "agl_grouped"
"""What ``attn_implementation`` is set to."""


def register() -> str:
    """Make the implementation known to transformers; returns its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    return NAME


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention.

    Args:
        module: the attention layer.
        query: ``[B, H, Q, D]``.
        key: ``[B, K, T, D]``; H is a multiple of K.
        value: ``[B, K, T, D]``.
        attention_mask: booleans ``[B, 1, Q, T]``; or integers ``[B, 1, 1, T]``, the ``ends`` of the learner's lines;
            or None for plain causal attention.
        dropout: probability.
        scaling: of the scores; None for ``1 / sqrt(D)``.
        others: what transformers hands on to every implementation.

    Returns:
        ``[B, Q, H, D]`` and no weights, as transformers expects.
    """
    if attention_mask is not None and attention_mask.dtype == torch.long:
        return span_attention(query, key, value, attention_mask[:, 0, 0], scaling), None
    batch, heads, length, size = query.shape
    shared = heads // key.shape[1]
    if attention_mask is None or shared == 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    query = query.reshape(batch, key.shape[1], shared * length, size)
    if length > 1:
        attention_mask = attention_mask.repeat(1, 1, shared, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch, heads, length, size).transpose(1, 2).contiguous(), None


# ------------------------------------------------------------------------------------------------ which models can

_can: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def decoder_of(model: Any) -> Any:
    """What makes last states from token ids, below the head and an adapter's wrapper."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return plain.get_decoder()


def sees_spans(model: Any) -> bool:
    """Whether the model obeys ``ends`` and positions, so that rows may share a line and prefixes may be shared.

    Sliding windows, position biases such as ALiBi, and state-space layers look at places in the line, not at spans.
    Such models are told by their configuration, and any other by a trial: a small tree must give the same states as
    its rows one at a time. It is made once for each model; a model that fails is reported, and its rows are padded.
    """
    decoder = decoder_of(model)
    if decoder not in _can:
        reason = _unfit(decoder) or _trial(decoder)
        if reason:
            log.warning("rows are padded, not packed, and prefixes are not shared: %s", reason)
        _can[decoder] = not reason
    return _can[decoder]


def _unfit(decoder: Any) -> str:
    config = decoder.config.get_text_config()
    if config._attn_implementation != NAME:
        return f"the model was loaded with attn_implementation={config._attn_implementation!r}, not {NAME!r}"
    names = inspect.signature(decoder.forward).parameters
    if missing := {"position_ids", "attention_mask"} - set(names):
        return f"{config.model_type!r} takes no {sorted(missing)}"
    if other := set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
        return f"{config.model_type!r} has layers of the kinds {sorted(other)}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return f"{config.model_type!r} looks back no more than sliding_window={window} tokens"
    for name in ("attn_logit_softcapping", "attention_chunk_size", "alibi"):
        if getattr(config, name, None):
            return f"{config.model_type!r} has {name}={getattr(config, name)!r}"
    return ""


def _trial(decoder: Any) -> str:
    """Two rows that share a prefix, together and apart; what differs, or nothing."""
    parameter = next(decoder.parameters())
    tokens = torch.randint(
        3, decoder.config.get_text_config().vocab_size, (8,), generator=torch.Generator().manual_seed(0)
    )
    tree, ends = tokens[None], torch.tensor([[7, 7, 7, 5, 5, 5, 7, 7]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4]])
    rows = [torch.arange(6), torch.tensor([0, 1, 2, 6, 7])]
    device = parameter.device

    def states(ids: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        mask = None if mask is None else mask.to(device)
        found = decoder(
            input_ids=ids.to(device), position_ids=places.to(device), attention_mask=mask, use_cache=False
        ).last_hidden_state
        return found[0].float()

    try:
        with torch.no_grad():
            together = states(tree, positions, ends[:, None, None])
            apart = [states(tokens[row][None], torch.arange(len(row))[None], None) for row in rows]
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{decoder.config.model_type!r} refuses spans: {type(error).__name__}: {error}"[:300]
    tolerance = 0.05 if parameter.dtype in (torch.bfloat16, torch.float16) else 1e-3
    for row, alone in zip(rows, apart, strict=True):
        difference = float((together[row] - alone).norm() / alone.norm())
        if not difference < tolerance:
            return f"{decoder.config.model_type!r} computes other states for rows that share a line ({difference:.2g})"
    return ""
