"""Fit the factors of `agl_trainer.batch.layout.Cost`: ``python benchmarks/costs.py``.

Forward and backward passes of three Llamas over ten layouts are timed in seconds of the processor, on one thread, and
explained by least squares of the relative error, without negative factors. What is printed first are the factors as
ratios to that of ``weights``; they are copied into `Cost` by hand, rounded. The project's machine gave PAIR 6.2, CALL
1.1e7, BATCH 5.9e7, SWEEP 93, WIDTH 4082 (median error 5 %, largest 30 %). A factor for merging the parts of a query
came out as 0 and was left out.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agl_trainer import attention, spans
from agl_trainer.batch.layout import Cost

MODELS = ((64, 2, 4, 128), (256, 6, 4, 704), (576, 3, 9, 1536))
"""Hidden size, layers, heads, inner size."""


def packed(*sizes: int) -> torch.Tensor:
    """Rows end to end."""
    stops = torch.tensor(sizes).cumsum(0)
    return (stops - 1).repeat_interleave(torch.tensor(sizes))[None]


def tree(trunk: int, leaves: int, leaf: int) -> torch.Tensor:
    """A prefix and what follows it, no two of equal length."""
    ends = packed(trunk, *(leaf + index for index in range(leaves)))
    ends[0, :trunk] = ends.shape[1] - 1
    return ends


LAYOUTS = {
    "one row of 16": packed(16),
    "one row of 512": packed(512),
    "one row of 1200": packed(1200),
    "64 rows of 8 to 14": packed(*(8 + index % 7 for index in range(64))),
    "20 rows of 50 to 69": packed(*(50 + index for index in range(20))),
    "256 and 8 leaves of 64 to 71": tree(256, 8, 64),
    "40 and 32 leaves of 10 to 41": tree(40, 32, 10),
    "1000 and 8 leaves of 100 to 107": tree(1000, 8, 100),
    "16 padded rows of 32": torch.full((16, 32), 31),
    "64 padded rows of 16": torch.full((64, 16), 15),
}


def seconds(decoder: Any, ends: torch.Tensor) -> float:
    """Of the processor, for a pass forward and backward; the first is a warm-up."""
    tokens = torch.randint(3, 250, ends.shape)
    places = torch.arange(ends.shape[1]).expand_as(ends)
    times: list[float] = []
    for _ in range(4):
        start = time.process_time()
        states = decoder(input_ids=tokens, position_ids=places, attention_mask=ends[:, None, None], use_cache=False)
        states.last_hidden_state.square().sum().backward()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Time, fit, print."""
    torch.set_num_threads(1)
    terms: list[list[float]] = []
    measured: list[float] = []
    for hidden, layers, heads, inner in MODELS:
        config = LlamaConfig(
            vocab_size=300,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).eval()
        cost = Cost.of(model)
        for ends in LAYOUTS.values():
            work = spans.plan(ends.numpy().tobytes(), ends.shape[1])
            pairs = sum(count * size * (size + 1) / 2 for _, size, count in work.runs)
            pairs += sum((b - a) * (d - c) for a, b, c, d in work.links)
            tokens, calls = ends.numel(), len(work.runs) + len(work.links)
            terms.append(
                [
                    cost.weights * tokens,
                    cost.width * tokens,
                    cost.attended * pairs,
                    cost.layers * calls,
                    cost.layers,
                    cost.weights,
                ]
            )
            measured.append(seconds(model.get_decoder(), ends))
    table = torch.tensor(terms, dtype=torch.float64) / torch.tensor(measured, dtype=torch.float64)[:, None]
    names = ["weights", "WIDTH", "PAIR", "CALL", "BATCH", "SWEEP"]
    scale = table.norm(dim=0)
    kept = list(range(len(names)))
    while True:  # leave out what would help only by being negative
        target = torch.ones(len(table), 1, dtype=torch.float64)
        found = torch.linalg.lstsq(table[:, kept] / scale[kept], target).solution[:, 0]
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    factors = dict(zip([names[place] for place in kept], (found / scale[kept]).tolist(), strict=True))
    misses = ((table[:, kept] / scale[kept]) @ found - 1).abs()
    print({name: round(value / factors["weights"], 1) for name, value in factors.items()})
    print(f"relative error: median {float(misses.median()):.2f}, largest {float(misses.max()):.2f}")


if __name__ == "__main__":
    main()
