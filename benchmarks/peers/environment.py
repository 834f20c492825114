"""Environments of released peers, made on first use and kept in ``.nox``; and what a result says about the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def make(peer: str, *others: str, python: str = sys.executable) -> Path | str:
    """The Python of an environment that holds ``peer``, such as ``trl==1.16.0``; or why there is none.

    Args:
        peer: a pinned requirement; the environment bears its name.
        others: more requirements.
        python: what the environment is made with.
    """
    environment = ROOT / ".nox" / peer.replace("==", "-")
    inside = environment / "bin" / "python"
    done = environment / "complete"
    if done.exists():
        return inside
    beside = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or beside
    settings = {**os.environ}
    if "UV_FIND_LINKS" not in settings and shutil.which("nvidia-smi") is None:
        settings.setdefault("UV_TORCH_BACKEND", "cpu")
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", python, environment],
        [uv, "pip", "install", "--quiet", "--python", inside, peer, *others],
    ):
        if subprocess.run(command, env=settings).returncode:
            shutil.rmtree(environment, ignore_errors=True)
            return f"`{' '.join(map(str, command))}` failed"
    done.touch()
    return inside


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on: processor, how busy it is, Python, and the versions of these packages."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
