"""Token ids and logprobs as packed arrays, and how much of one sequence another repeats."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

BYTES_PER_ID = 4


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as 32-bit integers."""
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """What `pack_ids` packed."""
    ids: array[int] = array("i")
    ids.frombytes(packed)
    return tuple(ids)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Logprobs as 64-bit floats: what comes back is what went in, to the last bit."""
    return array("d", logprobs).tobytes()


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    """What `pack_logprobs` packed."""
    logprobs: array[float] = array("d")
    logprobs.frombytes(packed)
    return tuple(logprobs)


def shared_bytes(one: bytes, other: bytes) -> int:
    """How many bytes of whole token ids both begin with."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other)) // BYTES_PER_ID
    while low < high:  # `low` ids are known to be equal; compare blocks, because that runs at memory speed
        middle = (low + high + 1) // 2
        block = slice(low * BYTES_PER_ID, middle * BYTES_PER_ID)
        if one[block] == other[block]:
            low = middle
        else:
            high = middle - 1
    return low * BYTES_PER_ID
