"""Sums that do not depend on the company, and what happens where a library's kernels would make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from agl_trainer.backends.transformers import arithmetic
from agl_trainer.backends.transformers.arithmetic import BLOCK, FixedRows, rounded


@pytest.mark.parametrize(("size", "outputs"), [(128, 256), (256, 128), (576, 192), (1536, 576), (64, 481)])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(size: int, outputs: int):
    torch.manual_seed(0)
    rows, weight = torch.randn(400, size), torch.randn(outputs, size)
    with FixedRows():
        everything = functional.linear(rows, weight)
        for count in (1, 3, 15, 16, 17, 31, 40, 64, 129):
            for start in (0, 7, 200):
                some = functional.linear(rows[start : start + count], weight)
                assert torch.equal(some, everything[start : start + count]), (count, start)
    assert torch.allclose(everything, functional.linear(rows, weight), atol=1e-3)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_query_has_the_same_bits_alone_in_a_chunk_and_beside_longer_rows(size: int):
    torch.manual_seed(0)
    most = 1024
    query, key, value = torch.randn(3, 1, 2, most, size)
    positions = torch.arange(most)

    def attend(first: int, last: int, longest: int) -> torch.Tensor:
        keys = rounded(longest)
        mask = positions[None, None, None, :keys] <= positions[None, None, first:last, None]
        with FixedRows():
            return functional.scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, :keys], value[:, :, :keys], attn_mask=mask
            )

    for place in (9, 61, 130, 255, 256, 300, 600):
        alone = attend(place, place + 1, place + 1)
        for first, last, longest in ((place, place + 1, 1000), (place - 5, place + 1, place + 1), (0, place + 40, 700)):
            chunk = attend(first, last, max(longest, last))
            assert torch.equal(chunk[:, :, place - first], alone[:, :, 0]), (place, first, last, longest)


def test_products_that_a_kernel_sums_otherwise_are_taken_apart(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    def fickle(input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        """As of a library that has another kernel for many rows."""
        sizes.append(len(input))
        return plain(input, weight, bias) + (1e-6 if len(input) > BLOCK else 0.0)

    plain = functional.linear
    monkeypatch.setattr(functional, "linear", fickle)
    monkeypatch.setattr(arithmetic, "_whole", {})
    rows, weight = torch.randn(100, 8), torch.randn(4, 8)
    first, again = arithmetic._linear(rows, weight), arithmetic._linear(rows, weight)
    assert torch.equal(first, again)
    assert torch.equal(first[:20], arithmetic._linear(rows[:20], weight))
    tried, after = sizes[:5], sizes[5:9]
    assert tried == [32, 32, 32, 32, 112]
    assert after == [32, 32, 32, 32], "the trial is made once"
