"""Weights that are not finite: they explain whatever a self-check finds, so they are looked at before it is blamed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from attmemo.errors import AdapterCheckError, DatabaseNotFoundError


def weight_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first weight that holds NaN or an infinite number; None: there is none."""
    return next((name for name, weight in model.named_parameters() if not _is_finite(weight)), None)


def check_weights(model: nn.Module) -> None:
    """Check that all weights are finite.

    Raises
    ------
    AdapterCheckError
        Names the first weight that is not.
    """
    name = weight_not_finite(model)
    if name is not None:
        raise AdapterCheckError(
            f"weight {name} is not finite.",
            "save the model anew; a conversion to float16, for example, makes large numbers infinite",
        )


@contextmanager
def weights_first(model: nn.Module) -> Iterator[None]:
    """Inside, a failed self-check, or what was raised in its place, becomes the error of `check_weights` if it can.

    Weights are not looked at where all is well: a model may hold a number that no input of its user reaches.
    """
    try:
        yield
    except (AdapterCheckError, DatabaseNotFoundError):
        check_weights(model)
        raise


def _is_finite(weight: Tensor) -> bool:
    if not weight.is_floating_point() or weight.is_meta or not weight.numel():
        return True
    known = weight.detach() if weight.element_size() > 1 else weight.detach().float()  # float8 cannot be compared
    return all(math.isfinite(float(end)) for end in known.aminmax())  # NaN is passed on; nothing is copied
