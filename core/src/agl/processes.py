"""Child processes of ours end when the process that started them is gone, however it ended."""

from __future__ import annotations

import os
import signal
import threading
import time

CHECK_SECONDS = 1.0


def end_with_parent() -> None:
    """End this process by SIGTERM once ``AGL_PARENT`` is no longer its parent; without that variable do nothing."""
    parent = os.environ.get("AGL_PARENT")
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="agl-parent", daemon=True).start()
