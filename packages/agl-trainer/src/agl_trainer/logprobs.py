"""Logprobs of the sampled tokens, and of nothing else: the logits of a whole batch never exist."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from agl.errors import ConfigError
from agl_trainer.critic import Critic

CHUNK = 512
"""Sampled tokens whose logits exist at one time."""


class TokenOutputs(NamedTuple):
    """What the model says about each sampled token: ``[N]`` each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    values: torch.Tensor | None = None


class LogprobModel(nn.Module):
    """A causal language model that returns logprobs of given tokens at given places.

    It is a module of its own so that data-parallel wrappers see one forward call.
    """

    def __init__(self, model: Any, critic: Critic | None = None) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        refuse_unsupported(plain.config)
        # In tuples, so that they are not registered twice: they are parts of `model`.
        self._parts: tuple[Any, Any] = (plain.get_decoder(), plain.get_output_embeddings())

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        ends: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        *,
        entropies: bool = False,
        values: bool = False,
    ) -> TokenOutputs:
        """What is said of ``targets``, each from the state at its ``source``; see `agl_trainer.batch.pack`.

        Args:
            entropies: of the distributions that the targets were drawn from; doubles the time spent on logits.
            values: what the critic expects.
        """
        decoder, head = self._parts
        states = _states(decoder, token_ids, position_ids, ends, sources)
        expected = None
        if values:
            assert self.critic is not None
            trunk = self.critic.trunk
            own = states if trunk is None else _states(trunk, token_ids, position_ids, ends, sources)
            expected = self.critic(own)
        return TokenOutputs(
            selected_logprobs(head, states, targets, temperatures),
            selected_entropies(head, states, temperatures) if entropies else None,
            expected,
        )


def _states(
    decoder: Any, token_ids: torch.Tensor, position_ids: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor
) -> torch.Tensor:
    """``[N, H]`` last states at the sources."""
    hidden = decoder(
        input_ids=token_ids, position_ids=position_ids, attention_mask=visibility(ends), use_cache=False
    ).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])[sources]


def visibility(ends: torch.Tensor) -> torch.Tensor:
    """``[B, 1, L, L]``: a token sees itself and those earlier ones whose span it stands in."""
    place = torch.arange(ends.shape[1], device=ends.device)
    return ((place[:, None] >= place) & (place[:, None] <= ends[:, None, :]))[:, None]


def selected_logprobs(
    head: nn.Module, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """``log softmax(head(state) / temperature)[target]``, chunk by chunk, forward and backward.

    Args:
        head: hidden size to vocabulary.
        states: ``[N, H]``.
        targets: ``[N]`` token ids.
        temperatures: ``[N]``.
    """
    parts = [
        checkpoint(_chunk, head, *chunk, use_reentrant=False)
        for chunk in zip(states.split(CHUNK), targets.split(CHUNK), temperatures.split(CHUNK), strict=True)
    ]
    return torch.cat(parts) if parts else states.new_zeros(0)


def _chunk(head: nn.Module, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    logits = _logits(head, states, temperatures)
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def _logits(head: nn.Module, states: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    logits = head(states)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits / temperatures.to(logits.dtype)[:, None]


def selected_entropies(head: nn.Module, states: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """``[N]`` entropies of ``softmax(head(state) / temperature)``, chunk by chunk, forward and backward."""
    parts = [
        checkpoint(_entropy_chunk, head, *chunk, use_reentrant=False)
        for chunk in zip(states.split(CHUNK), temperatures.split(CHUNK), strict=True)
    ]
    return torch.cat(parts) if parts else states.new_zeros(0)


def _entropy_chunk(head: nn.Module, states: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    logprobs = _logits(head, states, temperatures).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def refuse_unsupported(config: Any) -> None:
    """Refuse models that transform their logits after the head: we would compute other logprobs than they do.

    Raises:
        ConfigError: it names the setting.
    """
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"models with {name!r} are not supported ({config.model_type!r}): their logits are changed after the "
                "head, and the trainer would learn from other probabilities than the model samples with"
            )
