"""The training loop, from top to bottom: tasks, rollouts, transitions, credit, advantages, rows, step, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from agl.errors import CaptureError, UsageError
from agl.protocols import AgentFunction, Algorithm
from agl.records import Rollout
from agl_trainer import algorithms
from agl_trainer.algorithms.sft import SFT
from agl_trainer.batch.build import check_credit, count, staleness, train_rows
from agl_trainer.batch.refill import fill
from agl_trainer.config import TrainConfig
from agl_trainer.session import Result, Session
from agl_trainer.tasks import epochs, fingerprint, read_tasks
from agl_trainer.warmup import Warmup

EMPTY_STEPS = 5
"""Steps in a row in which every group's rewards were all equal, after which training stops with the reason."""
NOTHING_TO_LEARN = (
    "the rewards inside every group were all equal, so there is nothing to learn from. Use easier or harder tasks, a "
    "denser reward, a warm-up, or a larger group_size"
)

Tasks = str | Path | Sequence[Mapping[str, Any]]


class Trainer:
    """Trains the model inside an agent.

    ``Trainer(answer, tasks, model="Qwen/Qwen2.5-1.5B-Instruct", optimize=["writer"]).fit()``, or, to own the loop,
    ``for batch in trainer.batches(): trainer.step(batch)``.
    """

    def __init__(
        self,
        agent: AgentFunction,
        tasks: Tasks,
        *,
        eval_tasks: Tasks | None = None,
        warmup: Warmup | None = None,
        resume: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Check everything that can be checked before a model is loaded.

        Args:
            agent: ``agent(task, llm) -> reward``, synchronous or not; a number, named parts, or None for unscored.
            tasks: mappings, or a JSONL file of them.
            eval_tasks: held-out tasks, evaluated before, during and after.
            warmup: imitate a teacher first.
            resume: folder of a run that was interrupted; this one goes on where it stood.
            settings: see `agl_trainer.config.TrainConfig`.

        Raises:
            UsageError: an unknown or bad setting, no tasks, an unknown algorithm or backend, a wrong argument.
        """
        if not callable(agent):
            raise UsageError(f"agent={agent!r} is no function; write one that takes (task, llm) and returns a reward")
        if warmup is not None and not isinstance(warmup, Warmup):
            raise UsageError(f"warmup={warmup!r} is no Warmup; write warmup=Warmup(demonstrate=...)")
        self.config = TrainConfig.of(**settings)
        self.tasks = read_tasks(tasks)
        self.eval_tasks = read_tasks(eval_tasks) if eval_tasks is not None else []
        self.warmup = warmup
        self.algorithm: Algorithm = algorithms.make(self.config.algorithm)
        check_credit(self.algorithm, self.config)
        self.session = Session(agent, self.config, resume, fingerprint(self.tasks, self.eval_tasks, warmup))
        self._thrown: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """Steps of reinforcement learning so far."""
        return self.session.position.steps

    @property
    def folder(self) -> Path:
        """What this run writes is in it."""
        return self.session.folder

    def fit(self) -> Result:
        """Evaluate, warm up, train, evaluate, save."""
        with self.session as session:
            session.evaluate_once("before", self.eval_tasks)
            if self.warmup is not None:
                self.warm_up(self.warmup)
                session.evaluate_once("after warm-up", self.eval_tasks)
            for batch in self.batches():
                self.step(batch)
                if self.config.eval_every and self.steps % self.config.eval_every == 0 < self.config.steps - self.steps:
                    session.evaluate_once(f"after step {self.steps}", self.eval_tasks)
            if self.steps and session.policy.version == session.position.began:
                raise CaptureError(f"no step changed the weights: {NOTHING_TO_LEARN}")
            session.evaluate_once("after", self.eval_tasks)
            return session.result()

    def batches(self) -> Iterator[list[Rollout]]:
        """Scored rollouts for each step: ``tasks_per_step`` groups of ``group_size``, by the present policy."""
        with self.session as session:
            play, judge = partial(session.draw, self.tasks), partial(session.judge, algorithm=self.algorithm)
            while self.steps < self.config.steps:
                batch, self._thrown = fill(play, judge, self.config.tasks_per_step, self.config.refill)
                yield batch
                session.checkpoint()

    def step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """One training step on scored rollouts; returns its metrics."""
        config, session, position = self.config, self.session, self.session.position
        scored, gains = session.judge(rollouts, self.algorithm)
        rows = train_rows(scored, gains, self.algorithm, config.max_length)
        metrics = count(rollouts, scored, gains) | staleness(scored, session.policy.version) | self._thrown
        session.policy.scale_learning_rate(config.decay(self.steps))
        if rows:
            metrics |= session.learn(rows, self.algorithm, config.epochs)
        position.empty_steps = 0 if rows else position.empty_steps + 1
        if position.empty_steps >= EMPTY_STEPS:
            raise CaptureError(
                f"{EMPTY_STEPS} steps in a row changed no weight (mean reward {metrics['reward']:.3f}): "
                f"{NOTHING_TO_LEARN}"
            )
        position.steps += 1
        if self.steps == session.patience:
            session.selection.check(session.agents_seen)
        session.report(self.steps, metrics)
        return metrics

    def warm_up(self, warmup: Warmup) -> None:
        """Supervised steps on demonstrated rollouts, with an optimiser of their own."""
        session, config, position = self.session, self.config, self.session.position
        if position.warmed == warmup.steps:
            return  # the run was resumed after it
        tasks = read_tasks(warmup.tasks) if warmup.tasks is not None else self.tasks
        chosen = list(islice(epochs(tasks, config.seed), warmup.steps * warmup.batch))
        scored = session.demonstrations(chosen, warmup)
        with session.warm_up_optimizer(warmup.learning_rate or config.learning_rate):
            for start in range(position.warmed * warmup.batch, len(scored), warmup.batch):
                session.checkpoint()
                part = scored[start : start + warmup.batch]
                ones = [[1.0] * len(item.transitions) for item in part]
                rows = train_rows(part, ones, SFT(), config.max_length)
                if rows:  # none where no learner was called
                    session.report(start // warmup.batch + 1 - warmup.steps, session.learn(rows, SFT()))
                position.warmed += 1
        position.warmed, position.began = warmup.steps, session.policy.version
        session.checkpoint()
