"""A vLLM server of our own: started in a process group of its own, watched, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agl.errors import BackendError

REFUSED = 64
"""Exit code of `agl_vllm.serve` when there is no vLLM that fits."""
TAIL_CHARACTERS = 2000
PATIENCE_SECONDS = 5.0


class Server:
    """One process that runs ``vllm serve``, and the children it starts.

    It listens on a socket in a folder that only this user may enter: vLLM's routes that change weights ask for no key.
    """

    def __init__(self, environment: dict[str, str], socket: Path, log: Path) -> None:
        self.socket = socket
        self.log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, which is that of its group as well; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self, command: Sequence[str]) -> None:
        """Start; `Replica.wait` tells when it is ready."""
        self.socket.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        line = [*command, "--uds", str(self.socket)]
        with self.log.open("ab") as log:
            log.write(f"agl: {' '.join(line)}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    line,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise BackendError(f"vLLM's interpreter {line[0]!r} cannot be run: {error}") from error

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()

    def check_started(self, since: float, limit: float) -> None:
        """To be asked again and again while it starts.

        Raises:
            BackendError: it has ended, or takes too long; the text has the last lines of its log.
        """
        if self.exit_code == REFUSED:
            raise BackendError(self.tail().splitlines()[-1].removeprefix("agl: "))
        if self.exit_code is not None:
            raise BackendError(
                f"vLLM ended while it started (exit {self.exit_code}); its log {self.log} ends: {self.tail()}"
            )
        if time.monotonic() - since > limit:
            raise BackendError(
                f"vLLM did not start within {limit:g} s; give it longer by start_timeout. Its log {self.log} ends: "
                f"{self.tail()}"
            )

    async def stop(self) -> None:
        """End the whole group: politely, then at once."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        self._signal(signal.SIGKILL)  # children outlive a parent that was killed
        self._process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
