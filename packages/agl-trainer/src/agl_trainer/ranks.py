"""The processes of one run. Rank 0 leads: it owns server, engine, rollouts, folder and logs. All of them train."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agl.errors import RunError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run; alone unless `accelerate launch` or `torchrun` started several.

    Every method but `leads` is a meeting: all ranks must call it, in the same order.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    """Of processes that exchange plain objects (gloo). It waits for as long as rank 0 waits for rollouts."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def lead(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work; all return its result.

        Raises:
            RunError: on the other ranks, when it failed on rank 0, which raises the error itself.
        """
        if self.size == 1:
            return work()
        answer: list[Any] = [None, None]
        if self.leads:
            try:
                answer[0] = work()
            except BaseException as error:
                dist.broadcast_object_list([None, _text(error)], src=0, group=self.group)
                raise
        dist.broadcast_object_list(answer, src=0, group=self.group)
        result, failure = answer
        if failure is not None:
            raise RunError(f"rank 0 failed, and so this one stops too: {failure}")
        return result

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self) -> Generator[None]:
        """What one rank raises inside, all raise when they meet at the end: none waits for one that is gone.

        Raises:
            RunError: on the ranks that did not fail themselves.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        reports = self.gather(None if failure is None else _text(failure))
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                raise RunError(f"rank {rank} failed, and so this one stops too: {report}")

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum over ranks by name; a rank that lacks a name adds nothing to it."""
        sums: dict[str, float] = {}
        for own in self.gather(values):
            for name, value in own.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def add_up(self, parameters: Sequence[torch.Tensor]) -> None:
        """Sum gradients over ranks, in place. One that no rank has stays None; those of absent ranks count as 0."""
        if self.size == 1:
            return
        present = self.gather([parameter.grad is not None for parameter in parameters])
        waiting: list[Any] = []
        for parameter, anywhere in zip(parameters, map(any, zip(*present, strict=True)), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in waiting:
            work.wait()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
