"""One run: its policy, backend, services and folder, and what the loop asks of them."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from agl import endpoint, log, plugins
from agl.errors import BackendError, CaptureError, ConfigError, NumericsError, SelectionError, UsageError
from agl.protocols import AgentFunction, Algorithm, Backend
from agl.records import Mode, Rollout, Task
from agl.selection import Selection
from agl_trainer import algorithms, backends, canary, card, checkpoint, numerics, updates
from agl_trainer.batch.build import Scored, advantages, broken_rewards, credited, score
from agl_trainer.batch.pack import TrainRow
from agl_trainer.checkpoint import Position
from agl_trainer.config import TrainConfig
from agl_trainer.evaluate import Evaluation, Interval
from agl_trainer.policy import Policy, join
from agl_trainer.progress import Progress, say
from agl_trainer.ranks import Ranks
from agl_trainer.services import Services
from agl_trainer.tasks import epochs
from agl_trainer.warmup import PLAYED, Demonstrator, Warmup

RUN = "run.json"
"""What makes the run what it is; a run that goes on with it must say the same."""
CHECKPOINTS = "checkpoints"
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    folder: Path
    model: Path
    """A ``from_pretrained`` directory, a PEFT adapter, or a folder with a PEFT adapter for each agent."""
    evaluations: Mapping[str, Evaluation]

    @property
    def gain(self) -> Interval | None:
        """Held-out gain of reinforcement learning: after, minus before it began (after the warm-up)."""
        if "after" not in self.evaluations:
            return None
        return self.evaluations["after"].gain_over(self.evaluations.get("after warm-up") or self.evaluations["before"])

    def __str__(self) -> str:
        lines = [f"held-out reward {name}: {evaluation.reward}" for name, evaluation in self.evaluations.items()]
        if self.gain is not None:
            lines.append(f"gain by reinforcement learning: {self.gain}")
        return "\n".join([*lines, f"model: {self.model}"])


_running = threading.Lock()


@contextmanager
def _alone() -> Generator[None]:
    """One run for one process: random numbers, Accelerate's state and the local log are the process's."""
    if not _running.acquire(blocking=False):
        raise UsageError(
            "another Trainer is running in this process (a loop over batches() runs until it is left); wait for its "
            "end, or use another process"
        )
    try:
        yield
    finally:
        _running.release()


class Session:
    """Entered once by the loop (entering again inside is allowed): loads, starts, and stops in the end.

    Every rank has one and asks the same of it in the same order. What only rank 0 does stands inside `Ranks.lead`.
    """

    ranks: Ranks
    policy: Policy
    backend: Backend
    """Of rank 0 alone, like the services."""
    services: Services

    def __init__(
        self,
        agent: AgentFunction,
        config: TrainConfig,
        resume: str | Path | None = None,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; nothing is read or started before it is entered.

        Args:
            agent: which makes the rollouts.
            config: all settings.
            resume: folder of a run that was interrupted, to go on with.
            content: what else makes this run what it is; it must be the same again when it is resumed.
        """
        self.agent = agent
        self.config = config
        self.selection = Selection(config.optimize)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        self.folder = Path(config.output_dir) / f"{stamp}-seed{config.seed}" if resume is None else Path(resume)
        self.position = Position()
        self.agents_seen: set[str] = set()
        self.evaluations: dict[str, Evaluation] = {}
        self._resumes = resume is not None
        self._identity = {"settings": config.public(), **(content or {})}
        self._make_backend = backends.make(config)
        self._depth = 0
        self._kept = 0
        self._begun: set[str] = set()
        """Batches that this process has enqueued."""
        self._broken: list[str] = []
        self._since = 0.0

    def __enter__(self) -> Session:
        if self._depth == 0:
            with ExitStack() as stack:
                self._begin(stack)
                self._ending = stack.pop_all()
        self._depth += 1
        return self

    def _begin(self, stack: ExitStack) -> None:
        """Start everything; the stack knows how to stop what was started, whatever fails."""
        stack.enter_context(_alone())
        self.ranks = join()
        self.folder = self.ranks.lead(lambda: self._claim_folder(stack))
        self.policy = Policy(self.config, self.folder)
        stack.callback(self.policy.close)
        if self._resumes:
            self._restore()
        self.ranks.lead(lambda: self._serve(stack))
        self._canary()
        self.ranks.lead(lambda: self._announce(stack))
        self._since = time.monotonic()

    def _claim_folder(self, stack: ExitStack) -> Path:
        """Make the run's folder, or take the one that is resumed; no other process may work in it."""
        about = self.folder / RUN
        if self._resumes:
            try:
                kept = json.loads(about.read_text())
            except (OSError, ValueError) as error:
                raise ConfigError(f"resume={str(self.folder)!r} is no folder of a run: {about}: {error}") from error
            if told := checkpoint.differences(kept, self._identity):
                raise ConfigError(f"resume={str(self.folder)!r}: that run had other settings: {'; '.join(told)}")
        else:
            try:
                self.folder.mkdir(parents=True)
                about.write_text(json.dumps(self._identity, indent=1))
                for place in (about, self.folder, self.folder.parent):
                    checkpoint.to_disk(place)
            except FileExistsError:
                raise UsageError(f"this Trainer has run already, into {self.folder}; make a new one") from None
            except OSError as error:
                place = f"output_dir={self.config.output_dir!r}"
                raise ConfigError(f"{place}: cannot make {self.folder}: {error}") from error
        lock = stack.enter_context((self.folder / "lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it ends
        except BlockingIOError:
            raise UsageError(f"another process trains in {self.folder}; wait for its end") from None
        say(f"this run is kept in {self.folder}")
        return self.folder

    def _restore(self) -> None:
        """Go back to the newest checkpoint, or to the beginning; finished rollouts of later steps are still there."""
        folder = self.ranks.lead(lambda: checkpoint.newest(self.folder / CHECKPOINTS))
        if folder is not None:
            with self.ranks.together():  # machines may not see the same files
                tensors, state = checkpoint.read(folder)
            checkpoint.restore(self.policy, tensors, state["policy"])
            self.position = Position(**state["position"])
            self.position.ahead = [(number, first, count) for number, first, count in self.position.ahead]
            self.agents_seen = set(self.position.agents_seen)
            self.evaluations = {kept["name"]: Evaluation(**kept) for kept in self.position.evaluations}
            self._kept = self.position.done
        if self.ranks.leads:
            log.rewind(self.folder, self.position.logged)
            say(f"going on from {'the beginning' if folder is None else f'checkpoint {folder.name}'}")

    def _serve(self, stack: ExitStack) -> None:
        self.backend = self._make_backend(self.policy, self.config)
        self.services = Services(self.agent, self.config, self.backend, self.folder)
        stack.callback(self.services.close)
        self.services.start()
        self.services.serve(self.policy.version)

    def _announce(self, stack: ExitStack) -> None:
        self.policy.start_trackers(self.folder.name)
        hooks = plugins.manager().hook
        stack.callback(hooks.agl_train_end, trainer=self)
        hooks.agl_train_start(trainer=self)
        if self.policy.version:
            hooks.agl_weights_updated(version=self.policy.version)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._ending.close()

    # ----------------------------------------------------------------------------------------------- rollouts

    def draw(self, tasks: Sequence[Task], count: int) -> list[Rollout]:
        """Scored rollouts of the next so many tasks, in an order that the seed decides, each ``group_size`` times.

        In ``mode="async"`` the batches of the steps to come are begun here too. They are trained on in this same order,
        whole groups and the oldest first, so none can be older than `TrainConfig.ahead` updates and none is dropped.
        """
        config, position = self.config, self.position
        to_come = min(config.ahead, config.steps - position.steps - 1) if count == config.tasks_per_step else 0
        plans = position.ahead if count == config.tasks_per_step else []
        while len(plans) <= to_come:
            position.batches += 1
            plans.append((position.batches, position.drawn, count))
            position.drawn += count
        batches = [self._batch(tasks, *plan) for plan in plans]
        for batch in batches:
            if batch[0].batch not in self._begun:
                self._begun.add(batch[0].batch)
                self.ranks.lead(lambda batch=batch: self.services.enqueue(batch))
        del plans[0]
        return self._finish(batches[0])

    def _batch(self, tasks: Sequence[Task], number: int, first: int, count: int) -> list[Rollout]:
        chosen = list(islice(epochs(tasks, self.config.seed), first, first + count))
        return self._wanted(f"batch{number:05d}", chosen, self.config.group_size, "train")

    def rollouts(self, batch: str, tasks: Sequence[Task], samples: int, mode: Mode = "train") -> list[Rollout]:
        """Run the agent ``samples`` times on every task and score what it did; every rank gets the rollouts."""
        wanted = self._wanted(batch, tasks, samples, mode)
        self.ranks.lead(lambda: self.services.enqueue(wanted))
        return self._finish(wanted)

    def _wanted(self, batch: str, tasks: Sequence[Task], samples: int, mode: Mode) -> list[Rollout]:
        evaluating = mode == "eval" and self.config.eval_temperature is not None
        temperature = self.config.eval_temperature if evaluating else self.config.temperature
        # Only the temperature shapes the distribution: the trainer computes logprobs for nothing else.
        # A seed of the agent's own would make all rollouts of a group alike.
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": None}
        return [
            Rollout(
                id=self._rollout_id(batch, place, sample),
                task=task,
                batch=self._prefix + batch,
                mode=mode,
                optimize=self.selection.patterns,
                sampling=sampling,
                max_attempts=self.config.max_attempts,
            )
            for place, task in enumerate(tasks)
            for sample in range(samples)
        ]

    def _finish(self, wanted: Sequence[Rollout]) -> list[Rollout]:
        ended = self.ranks.lead(lambda: self._collect(wanted))
        first = not self.agents_seen
        self.agents_seen |= {call.agent for rollout in ended for call in rollout.calls}
        if first and self.agents_seen and self.ranks.leads:
            self._warn_of_absent_agents()
        return ended

    def _warn_of_absent_agents(self) -> None:
        """A name that is misspelt is told after the first rollouts; it is no error yet, for an agent may rest."""
        try:
            self.selection.check(self.agents_seen)
        except SelectionError as error:
            say(f"warning: {error}. Training stops after step {self.patience} if it stays so")

    @property
    def patience(self) -> int:
        """Steps in which a selected agent may rest before its name counts as wrong."""
        return min(3, self.config.steps)

    def _collect(self, wanted: Sequence[Rollout]) -> list[Rollout]:
        with Progress(wanted[0].batch) as progress:
            ended = self.services.collect(wanted, progress)
        self._refuse_two_names(ended)
        return [self.services.run(score(rollout)) for rollout in ended]

    def _refuse_two_names(self, rollouts: Sequence[Rollout]) -> None:
        """The header of a call chooses the adapter that answers it; the framework's name, the one that learns.

        Raises:
            CaptureError: they differ where each agent has an adapter.
        """
        for rollout in rollouts:
            named = {step.call_id: step.agent for step in rollout.steps if step.kind == "model_start"}
            for call in rollout.calls:
                agent = named.get(call.call_id or "") or call.agent
                if agent != call.agent and agent in self.policy.agents:
                    raise CaptureError(
                        f"a call of agent {agent!r} in rollout {rollout.id!r} reached the gateway under the name "
                        f"{call.agent!r}, so another adapter answered than would learn from it. Let the header "
                        "x-agl-agent through (a proxy may drop it), or set adapters='shared'"
                    )

    @property
    def _prefix(self) -> str:
        """A shared server serves several runs, which must not meet."""
        return f"{self.folder.name}." if self.config.server_url else ""

    def _rollout_id(self, batch: str, place: int, sample: int) -> str:
        return f"{self._prefix}{batch}-{place}-{sample}"

    def judge(self, rollouts: Sequence[Rollout], algorithm: Algorithm) -> tuple[list[Scored], list[list[float]]]:
        """Credit and advantage of every call that is trained, of scored rollouts of one step."""
        config, needs = self.config, algorithms.needs(algorithm)
        self._broken = broken_rewards(rollouts)
        # A critic learns when a reward came, which credit without a discount would not tell.
        discount = 1.0 if config.discount is None and "values" in needs else config.discount
        scored = credited(rollouts, self.selection, self.agents_seen, discount=discount, signals=config.signals)
        if "kl" in needs and not hasattr(algorithm, "token_advantages"):
            scored = updates.with_kl(self.policy, scored, algorithm, config)
        return scored, advantages(scored, algorithm, config.baseline)

    def demonstrations(self, tasks: Sequence[Task], warmup: Warmup) -> list[Scored]:
        """Run the agent while the teacher answers its calls; what was only played is left out."""
        rollouts = self.ranks.lead(lambda: self._play_teacher(tasks, warmup))
        self.agents_seen |= {call.agent for rollout in rollouts for call in rollout.calls}
        learners = Selection(warmup.agents) if warmup.agents is not None else self.selection
        return [
            Scored(item.rollout, [t for t in item.transitions if t.policy_version != PLAYED])
            for item in credited(rollouts, learners)
        ]

    def _play_teacher(self, tasks: Sequence[Task], warmup: Warmup) -> list[Rollout]:
        by_rollout = {self._rollout_id("demo", place, 0): task for place, task in enumerate(tasks)}
        engine = Demonstrator(self.policy.tokenizer, self.config.max_length, warmup, by_rollout)
        teacher = endpoint.serve_engine(engine)
        upstream = self.services.run(teacher.__aenter__())
        try:
            self.services.serve(self.policy.version, upstream)
            wanted = self._wanted("demo", tasks, 1, "demo")
            self.services.enqueue(wanted)
            return self._collect(wanted)
        finally:
            self.services.serve(self.policy.version)
            self.services.run(teacher.__aexit__(None, None, None))

    def evaluate_once(self, name: str, tasks: Sequence[Task]) -> None:
        """`evaluate`, unless the run did so before it was interrupted."""
        if name not in self.evaluations:
            self.evaluate(name, tasks)

    def evaluate(self, name: str, tasks: Sequence[Task]) -> Evaluation | None:
        """Run the agent on held-out tasks; they are never trained on. None when there are no tasks.

        Raises:
            CaptureError: not one rollout could be scored.
        """
        if not tasks:
            return None
        self.position.evaluated += 1
        # The version keeps a run that is resumed with other settings from taking this one's rollouts for its own.
        batch = f"eval{self.position.evaluated}-v{self.policy.version}"
        ended = self.rollouts(batch, tasks, self.config.eval_samples, "eval")
        scored = [(rollout.task.id, rollout.returned) for rollout in ended if rollout.returned is not None]
        if not scored:
            errors = {rollout.error or f"outcome {rollout.outcome}, no reward returned" for rollout in ended}
            raise CaptureError(f"evaluation {name!r}: no rollout has a reward; for instance: {min(errors)}")
        by_task: dict[str, list[float]] = {}
        for task, reward in scored:
            by_task.setdefault(task, []).append(reward.total)
        names = sorted({part for _, reward in scored for part in reward.parts})
        evaluation = Evaluation(
            name=name,
            scores={task: sum(values) / len(values) for task, values in by_task.items()},
            parts={part: sum(reward.parts.get(part, 0.0) for _, reward in scored) / len(scored) for part in names},
            unscored=len(ended) - len(scored),
        )
        self.evaluations[name] = evaluation
        reward = evaluation.reward
        self.position.reward = reward.mean
        metrics = {"eval/reward": reward.mean, "eval/low": reward.low, "eval/high": reward.high}
        metrics |= {f"eval/{part}": value for part, value in evaluation.parts.items()}
        metrics["eval/unscored"] = float(evaluation.unscored)
        said = f"held-out reward {name}: {reward} on {len(by_task)} tasks, {evaluation.unscored} unscored"
        self.ranks.lead(lambda: (say(said), self._log(self.position.steps, metrics)))
        return evaluation

    # ------------------------------------------------------------------------------------------------ weights

    def learn(self, rows: Sequence[TrainRow], algorithm: Algorithm, passes: int = 1) -> dict[str, float]:
        """Optimiser steps on one batch, then the new weights go to the backend under the next version."""
        if self._broken:
            self._dump(rows, self._broken[0])
            self.policy.refuse(self._broken[0])
            return {"refused": 1.0}
        with self._new_weights():
            try:
                metrics = updates.learn(self.policy, rows, algorithm, self.config, passes)
            except NumericsError as error:
                self._dump(rows, str(error))
                raise
        if "refused" in metrics:
            self._dump(rows, "its loss or gradient is not finite")
        return metrics

    def _dump(self, rows: Sequence[TrainRow], reason: str) -> None:
        folder = self.folder / REFUSED / f"{self.position.done + 1:06d}"
        weights = checkpoint.weights(self.policy)
        self.ranks.lead(lambda: numerics.dump(folder, rows, weights, self.policy, reason))
        if self.ranks.leads:
            say(f"a step was refused ({reason}); it is kept in {folder}, to be replayed by `agl replay`")

    @contextmanager
    def _new_weights(self) -> Generator[None]:
        """Inside, weights change. Afterwards the backend serves them under the next version.

        New calls are held while the backend's own weights change.
        """
        policy, ranks = self.policy, self.ranks

        def hold() -> None:
            self.services.serve(policy.version, state="updating")

        ranks.lead(lambda: hold() if self.backend.shares_weights else None)
        before = policy.fingerprint()
        try:
            yield
            if policy.fingerprint() != before:
                ranks.lead(hold)
                policy.version += 1
                self.position.reward = None
                ranks.lead(lambda: self.services.run(self.backend.update_weights(policy.version)))
                self._canary()
                ranks.lead(lambda: plugins.manager().hook.agl_weights_updated(version=policy.version))
        finally:
            if ranks.leads:
                self.services.serve(policy.version)

    def _canary(self) -> None:
        """Prove that the backend samples from the trainer's present weights, of every adapter; all ranks share them."""
        for agent in self.policy.agents or ("",):
            self._canary_of(agent)

    def _canary_of(self, agent: str) -> None:
        prompt = self.policy.tokenizer.encode(canary.TEXT, add_special_tokens=False)
        tokens = self.ranks.lead(lambda: self.services.run(self.backend.probe(prompt, canary.TOKENS, agent)))
        difference = canary.difference(self.policy, agent, prompt, tokens)
        wrong_version = {token.version for token in tokens} != {self.policy.version}
        if wrong_version or not difference <= canary.TOLERANCE[self.config.precision]:
            whose = f"adapter of agent {agent!r}" if agent else "weights"
            raise BackendError(
                f"the backend does not serve the trainer's {whose}: mean logprob difference {difference:.3g}, versions "
                f"{sorted({token.version for token in tokens})} instead of {self.policy.version}"
            )

    @contextmanager
    def warm_up_optimizer(self, learning_rate: float) -> Generator[None]:
        """Inside, the policy learns with an optimiser for it alone; afterwards with a fresh one."""
        if not self.position.warmed:  # otherwise a checkpoint brought it
            self.policy.optimizer = self.policy.new_optimizer(learning_rate)
        yield
        self.policy.optimizer = self.policy.new_optimizer(self.config.learning_rate)

    def checkpoint(self) -> None:
        """Keep all that the next step depends on, when it is time. To be called between two steps."""
        position, every = self.position, self.config.checkpoint_every
        last = position.steps == self.config.steps
        if every and position.done > self._kept and (last or position.done % every == 0):
            with self.policy.lock:
                tensors, values = checkpoint.capture(self.policy)
                self.ranks.lead(lambda: self._keep(tensors, values))
            self._kept = position.done

    def _keep(self, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        position, root = self.position, self.folder / CHECKPOINTS
        position.logged = log.size(self.folder)
        if position.logged:
            checkpoint.to_disk(self.folder / log.NAME)
        position.agents_seen = sorted(self.agents_seen)
        position.evaluations = [asdict(evaluation) for evaluation in self.evaluations.values()]
        state = {"position": asdict(position), "policy": values}
        written = checkpoint.write(root, tensors, state, f"{position.done:06d}")
        checkpoint.prune(root, self.config.keep_checkpoints, written)

    # ------------------------------------------------------------------------------------------------ records

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step and tell everyone who listens. The warm-up counts up to step 0."""
        now = time.monotonic()
        metrics["seconds"] = now - self._since
        self._since = now
        self.ranks.lead(lambda: self._tell(step, metrics))

    def _tell(self, step: int, metrics: dict[str, float]) -> None:
        if self.services.server is not None:
            metrics["server_restarts"] = float(self.services.server.restarts)
        self._log(step, metrics)
        plugins.manager().hook.agl_step_end(step=step, metrics=metrics)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        plugins.manager().hook.agl_log_metrics(step=step, metrics=metrics)
        self.policy.log(metrics, step)

    def result(self) -> Result:
        """Save the model with its card, and sum the run up."""
        return self.ranks.lead(self._save)

    def _save(self) -> Result:
        model = self.folder / "model"
        self.policy.save(model)
        result = Result(self.folder, model, self.evaluations)
        card.write(model, self.config, result)
        say(f"model saved in {model}")
        return result
