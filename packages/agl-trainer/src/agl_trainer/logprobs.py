"""Logprobs of the sampled tokens, and of nothing else: the logits of a whole batch never exist."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from agl.errors import BackendError, ConfigError
from agl_trainer import attention
from agl_trainer.critic import Critic
from agl_trainer.logits import selected_logprobs


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
        self._sees_spans = attention.sees_spans(model)

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
            entropies: of the distributions that the targets were drawn from.
            values: what the critic expects.
        """
        decoder, head = self._parts
        mask = self._mask(ends)
        states = _states(decoder, token_ids, position_ids, mask, sources)
        expected = None
        if values:
            assert self.critic is not None
            trunk = self.critic.trunk
            expected = self.critic(states if trunk is None else _states(trunk, token_ids, position_ids, mask, sources))
        return TokenOutputs(*selected_logprobs(head, states, targets, temperatures, entropies), expected)

    def _mask(self, ends: torch.Tensor) -> torch.Tensor | None:
        if self._sees_spans:
            return ends[:, None, None]  # our attention takes it for the mask
        if not bool((ends == ends.shape[1] - 1).all()):
            raise BackendError(
                "several rows share a line, and the model cannot keep them apart; lay them out by "
                "agl_trainer.batch.layout.micro_batches, or padded"
            )
        return None


def _states(
    decoder: Any, token_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None, sources: torch.Tensor
) -> torch.Tensor:
    """``[N, H]`` last states at the sources."""
    hidden = decoder(
        input_ids=token_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])[sources]


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
