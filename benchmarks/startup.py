"""How long agl takes to start: ``python benchmarks/startup.py``. Best of 20 each, so the machine may be shared.

Budgets, beyond the bare interpreter: 150 ms for ``import agl``, 300 ms for ``agl --help``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "bare interpreter": [sys.executable, "-c", "pass"],
    "import agl": [sys.executable, "-c", "import agl"],
    "agl --help": [str(Path(sys.executable).with_name("agl")), "--help"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one start."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return time.perf_counter() - begun


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        print(f"{name:<18} {min(seconds(command) for _ in range(20)) * 1000:6.0f} ms")
