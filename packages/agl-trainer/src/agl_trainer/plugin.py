"""What this package registers. Nothing heavy is imported before it is used."""

from __future__ import annotations

from typing import Any

from agl.hookspecs import hookimpl
from agl.protocols import Register
from agl_trainer import progress

agl_step_end = progress.agl_step_end


@hookimpl
def agl_register_algorithms(register: Register) -> None:
    """Register ``grpo``, ``rloo``, ``reinforce_pp``, ``ppo``, ``gspo`` and ``cispo``."""
    from agl_trainer.algorithms.cispo import CISPO
    from agl_trainer.algorithms.grpo import GRPO
    from agl_trainer.algorithms.gspo import GSPO
    from agl_trainer.algorithms.ppo import PPO
    from agl_trainer.algorithms.reinforce_pp import ReinforcePP
    from agl_trainer.algorithms.rloo import RLOO

    register("grpo", GRPO)
    register("rloo", RLOO)
    register("reinforce_pp", ReinforcePP)
    register("ppo", PPO)
    register("gspo", GSPO)
    register("cispo", CISPO)


@hookimpl
def agl_register_backends(register: Register) -> None:
    """Register ``transformers``, the embedded backend, and ``vllm``."""
    register("transformers", _transformers)
    register("vllm", _Vllm())


@hookimpl
def agl_register_commands(register: Register) -> None:
    """Register ``agl train``, ``agl eval``, ``agl replay`` and ``agl vllm``."""
    from agl_trainer import commands

    register("train", commands.train)
    register("eval", commands.evaluate)
    register("replay", commands.replay)
    register("vllm", commands.vllm)


def _transformers(policy: Any, config: Any) -> Any:
    from agl_trainer.backends.transformers.backend import TransformersBackend

    return TransformersBackend(policy, config)


class _Vllm:
    def __call__(self, policy: Any, config: Any, **settings: Any) -> Any:
        from agl_trainer.backends.vllm.backend import VllmBackend

        return VllmBackend(policy, config, **settings)

    def check(self, config: Any, **settings: Any) -> None:
        from agl_trainer.backends.vllm.options import check

        check(config, **settings)
