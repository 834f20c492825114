"""What runs inside vLLM, in its own interpreter: nothing here imports agl, and nothing of agl imports this.

vLLM finds it by the entry point beside this folder, in each of its processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time

TRANSFER = "agl"
"""Name of our way to transfer weights, for ``--weight-transfer-config``."""
CHECK_SECONDS = 1.0


def register() -> None:
    """Offer the weight transfer; end when the process that started this one is gone."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER, "agl_vllm.weights", "FileWeights")
    watch_parent()


def watch_parent() -> None:
    """End this process when its parent is gone: it would keep its memory and its cores for ever."""
    global _watching
    if _watching == os.getpid():
        return
    _watching = os.getpid()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)  # it holds nothing that is worth an orderly end

    threading.Thread(target=watch, name="agl-parent", daemon=True).start()


_watching: int | None = None
os.register_at_fork(after_in_child=watch_parent)  # a fork takes no threads along, and vLLM registers only once
