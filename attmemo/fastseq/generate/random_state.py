"""Random draws that are taken back: a call that is begun anew on another path draws what it would have drawn."""

from __future__ import annotations

from collections.abc import Callable

import torch


def remember(device: torch.device) -> Callable[[], None]:
    """Note where torch's default generators are, that of the CPU and of `device`; returns what puts them back there.

    Notes
    -----
    They belong to the process: what another thread draws from them in between is drawn again.
    """
    cpu = torch.get_rng_state()
    module = getattr(torch, device.type, None)
    own, put = getattr(module, "get_rng_state", None), getattr(module, "set_rng_state", None)
    if device.type == "cpu" or own is None or put is None:
        return lambda: torch.set_rng_state(cpu)
    which = () if device.type == "mps" else (device,)  # of which there is one
    state = own(*which)

    def rewind() -> None:
        torch.set_rng_state(cpu)
        put(state, *which)

    return rewind
