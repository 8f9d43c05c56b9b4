"""Says who meets whom when every rank is to meet every other."""

from __future__ import annotations

__all__ = ["partners"]


def partners(rank: int, size: int) -> list[int]:
    """Returns whom `rank` meets, in order, so that in each round all meet at once and nobody waits for a third.

    The circle method of tournaments: one place stays, the others turn by one each round. With an odd number, the one
    that would meet the empty place has nobody in that round.
    """
    places = size + size % 2
    turning = places - 1
    found: list[int] = []
    for round_ in range(turning):
        if rank == turning:
            other = next(p for p in range(turning) if 2 * p % turning == round_)
        else:
            other = (round_ - rank) % turning
            other = turning if other == rank else other
        if other < size:
            found.append(other)
    return found
