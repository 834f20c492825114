"""Measure the learner, part by part; the figures go to benchmarks/results/learner.json.

    python benchmarks/learner.py                        # every part
    python benchmarks/learner.py step --quick           # one part, small: does it run?

``layouts``: a pass over the same rows as trees, merged rows and a row for each call (`layouts`).
``logprobs``: logprobs of sampled tokens beside a full log-softmax (`vocabulary`).
``step``: one optimiser step beside TRL's GRPO trainer on the same rows (`peers.update_step`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import layouts
import vocabulary
from peers import environment, update_step

RESULTS = environment.ROOT / "benchmarks" / "results" / "learner.json"
PARTS: dict[str, Callable[[bool, bool], dict[str, Any]]] = {
    "layouts": layouts.measure,
    "logprobs": vocabulary.measure,
    "step": update_step.measure,
}
"""Each is called with (quick, with_peer) and returns what is kept under its name."""


def main() -> None:
    """Measure, print, keep; parts that were not asked for keep the figures they had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when none is named")
    parser.add_argument("--quick", action="store_true", help="small; nothing is kept")
    parser.add_argument("--without-peer", action="store_true", help="leave released peers out")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is named {sorted(unknown)}; there are {list(PARTS)}")

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.parts or PARTS:
        results[name] = PARTS[name](arguments.quick, not arguments.without_peer)
        if not arguments.quick:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
