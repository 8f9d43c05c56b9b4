"""Keeps a rank's gradients flat, however the user has set them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stalempi.compress import Rows
from stalempi.flat import Flat

__all__ = ["GradientBook"]


class GradientBook:
    """Joins the parameters' `.grad` to flat storage, and knows which of them have a gradient in this step.

    Args:
        parameters: those that are trained.
        flat: where their gradients lie, in the same order.
        on_ready: told the place of each parameter whose gradient backward has just added to its view in `flat`.
        rows: the form of those whose gradients are sparse rows, by place: their `.grad` is what backward makes, and
            their view has these rows.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        flat: Flat,
        *,
        on_ready: Callable[[int], None] | None = None,
        rows: Mapping[int, Rows] | None = None,
    ) -> None:
        self._parameters, self._flat, self._on_ready = parameters, flat, on_ready
        self._rows = rows or {}
        self._touched = np.zeros(len(parameters), dtype=bool)
        self._watched = [False] * len(parameters)

    def zero(self) -> None:
        """Sets all gradients to zero and makes them views of the flat storage again."""
        if not all(self._watched):
            self._watch()
        self._flat.zero()
        if not self._are_views():
            for place, (parameter, view) in enumerate(zip(self._parameters, self._flat.views, strict=True)):
                parameter.grad = None if place in self._rows else view
        self._touched.fill(False)

    def _are_views(self) -> bool:
        """Whether every `.grad` is its view; this and what calls it are on the path of every step of a tiny model."""
        return all(map(operator.is_, [parameter.grad for parameter in self._parameters], self._flat.views))

    def _watch(self) -> None:
        """Notes which parameters get a gradient, since a view that stays zero does not tell."""
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad and not self._watched[place]:  # one that was frozen may have thawed
                self._watched[place] = True
                parameter.register_post_accumulate_grad_hook(lambda _, place=place: self._note(place))

    def _note(self, place: int) -> None:
        self._touched[place] = True
        if self._on_ready and self._parameters[place].grad is self._flat.views[place]:
            self._on_ready(place)

    def collect(self, touched: NDArray[np.bool_]) -> None:
        """Makes the flat gradients hold what the parameters' `.grad` hold; writes to `touched` which have one."""
        if all(self._watched) and self._are_views():
            touched[:] = self._touched
        else:
            self._bring(touched)

    @torch.no_grad()
    def _bring(self, touched: NDArray[np.bool_]) -> None:
        for place, (parameter, view) in enumerate(zip(self._parameters, self._flat.views, strict=True)):
            gradient: Tensor | None = parameter.grad
            if place in self._rows:
                self._touched[place] = gradient is not None
                self._rows[place].rows = _fill_rows(view, gradient)
            elif gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient.to_dense())
                parameter.grad = view
                self._touched[place] = True
            elif parameter.requires_grad and not self._watched[place]:
                self._touched[place] = bool(view.any())  # thawed since zero
            touched[place] = gradient is not None and self._touched[place]


def _fill_rows(view: Tensor, gradient: Tensor | None) -> Tensor:
    """Makes `view` a gradient, sparse in its rows (or dense: then all count); returns the rows that it has."""
    if gradient is None:
        return torch.empty(0, dtype=torch.int64, device=view.device)
    view = view.data  # whose changes are not those that a program makes to a gradient
    if gradient.layout == torch.strided:
        view.copy_(gradient)
        return torch.arange(len(view), device=view.device)
    joined = gradient.coalesce()
    rows = joined.indices()[0]
    view[rows] = joined.values()
    return rows
