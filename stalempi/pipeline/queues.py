"""Holds the index algebra of Diversely Stale Parameters (arXiv 1909.02625, Eq. 6): queue lengths and staleness.

Letters of the paper: K blocks, block k = 0 .. K-1; p_k outputs of block k are on their way up, q_k error gradients of
block k on their way down, m_k inputs wait in block k for their backward. m_k is also the staleness of block k: updates
between the forward and the backward of a batch. The output of block k at its step n is the input of block k+1 at step
n + p_k, the error gradient of block k at step n is used by block k-1 at step n + q_k, so m_{k-1} = p_{k-1} + q_k + m_k.
"""

from __future__ import annotations

from collections.abc import Sequence

from stalempi.errors import ConfigError

__all__ = ["check_queues", "gradient_queues", "locks", "nearest_queues", "shortest_queues"]


def gradient_queues(p: Sequence[int], m: Sequence[int]) -> tuple[int, ...]:
    """Returns q_1 .. q_{K-1}, with q_k = m_{k-1} - p_{k-1} - m_k (Eq. 6)."""
    return tuple(m[k - 1] - p[k - 1] - m[k] for k in range(1, len(m)))


def nearest_queues(p: Sequence[int], m: Sequence[int], *, least: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the valid (p, m) next to the given ones: the same p, no m_k smaller, every q_k at least `least`."""
    new_p = [max(0, value) for value in p[: len(m)]]
    new_p += [0] * (len(m) - len(new_p))
    new_p[-1] = 0
    new_m = [max(0, value) for value in m]
    for k in range(len(m) - 2, -1, -1):
        new_m[k] = max(new_m[k], new_m[k + 1] + new_p[k] + least)
    return tuple(new_p), tuple(new_m)


def shortest_queues(blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shortest (p, m) without any locking: p = q = 1 on every link, so m_k = 2 (K-1-k)."""
    return tuple(int(k < blocks - 1) for k in range(blocks)), tuple(2 * (blocks - 1 - k) for k in range(blocks))


def check_queues(p: Sequence[int], m: Sequence[int]) -> None:
    """Raises ConfigError, naming the constraint broken and the nearest valid lengths, if no run can have these.

    m_{K-1} = 0 is allowed, as in the published configurations; so are p_k = 0 and q_k = 0, which lock (see `locks`).
    """
    if not m:
        raise ConfigError("m is empty: give one queue length a block, as in m=4,2,0")
    broken = _broken(p, m)
    if broken:
        good_p, good_m = nearest_queues(p, m)
        raise ConfigError(
            f"p={_list(p)} m={_list(m)}: {broken} (Eq. 6); the nearest that runs is p={_list(good_p)} m={_list(good_m)}"
        )


def _broken(p: Sequence[int], m: Sequence[int]) -> str | None:
    if len(p) != len(m):
        return f"p has {len(p)} lengths and m has {len(m)}, one a block is needed"
    if p[-1] != 0:
        return f"p_{len(p) - 1}={p[-1]}, but the last block hands its output to nobody, so it must be 0"
    for letter, lengths in (("p", p), ("m", m)):
        for k, length in enumerate(lengths):
            if length < 0:
                return f"{letter}_{k}={length} is negative"
    for k, q in enumerate(gradient_queues(p, m), start=1):
        if q < 0:
            return f"q_{k} = m_{k - 1} - p_{k - 1} - m_{k} = {q} is negative"
    return None


def locks(p: Sequence[int], m: Sequence[int]) -> list[str]:
    """Says which waits valid queue lengths leave: forward locking where p_k = 0, backward locking where q_k = 0."""
    found = [
        f"block {k} and block {k + 1} work on the same batch in the same step (p_{k}=0)"
        for k in range(len(p) - 1)
        if p[k] == 0
    ]
    return found + [
        f"block {k - 1} waits for the error gradient that block {k} computes in the same step (q_{k}=0)"
        for k, q in enumerate(gradient_queues(p, m), start=1)
        if q == 0
    ]


def _list(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))
