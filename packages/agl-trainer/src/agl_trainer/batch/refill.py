"""Dynamic sampling (DAPO, arXiv 2503.14476 §3.2): groups that teach nothing are replaced by those of further tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agl.records import Rollout
from agl_trainer.batch.build import Scored, learnable_groups


def fill(
    play: Callable[[int], Sequence[Rollout]],
    judge: Callable[[Sequence[Rollout]], tuple[Sequence[Scored], Sequence[Sequence[float]]]],
    groups: int,
    refill: int,
) -> tuple[list[Rollout], dict[str, float]]:
    """Rollouts for one step: as many groups as asked for, of which as many as possible teach something.

    A group without any advantage, or without a scored rollout, is thrown away and the next task of the epoch takes its
    place. After ``refill`` extra batches what is still missing is made up by such groups of the last batch; they count
    as degenerate. No task is drawn twice for this, and none is drawn that is not played.

    Args:
        play: runs the agent on the next so many tasks.
        judge: what they earned and their advantages, asked before anything is dropped.
        groups: how many the step wants.
        refill: extra batches at most; 0 plays once and judges nothing.

    Returns:
        The rollouts, and what was thrown away, to be logged (empty when ``refill`` is 0).
    """
    if not refill:
        return list(play(groups)), {}
    kept: list[Rollout] = []
    thrown: list[Rollout] = []
    replaced = batches = 0
    while True:
        played = list(play(groups - len({rollout.group for rollout in kept})))
        # With what is kept already: a small batch in which every rollout failed is no reason to stop.
        good = learnable_groups(*judge([*kept, *played]))
        flat = [rollout for rollout in played if rollout.group not in good]
        missing = len({rollout.group for rollout in flat})
        if not missing or batches == refill:
            kept += played
            break
        kept += [rollout for rollout in played if rollout.group in good]
        thrown += flat
        replaced += missing
        batches += 1
    sampled = sum(len(choice.response_ids) for one in thrown for call in one.calls for choice in call.choices)
    return kept, {
        "refill/batches": float(batches),
        "refill/groups": float(replaced),
        "refill/rollouts": float(len(thrown)),
        "refill/unscored": float(sum(rollout.returned is None for rollout in thrown)),
        "refill/tokens": float(sampled),
    }
