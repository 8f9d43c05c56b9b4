"""Says of a round without a server what BSP says: all add up, all go on."""

from __future__ import annotations

from typing import ClassVar

from stalempi.policy.bsp import BSP

__all__ = ["Allreduce"]


class Allreduce(BSP):
    """Every rank a worker, rank 0 too: the mean gradient is added up by all of them, and each makes the update itself.

    The decisions are those of BSP, and so is the result, to rounding; what differs is who adds up, and that a bucket
    travels as soon as its last gradient is there, while backward goes on.

    Args:
        overlap: False: send only when `step` is called. Needed where gradients are changed between backward and step
            (clipping, accumulation over several backwards) in some steps but not in the first, which is watched.
    """

    name: ClassVar[str] = "allreduce"
    has_server: ClassVar[bool] = False

    def __init__(self, *, overlap: bool = True) -> None:
        super().__init__()
        self.overlap = overlap

    def options(self) -> dict[str, int | float | str]:
        """Returns `overlap` where it is off."""
        return {} if self.overlap else {"overlap": 0}
