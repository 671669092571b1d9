"""A private copy of a model's module tree, one for each call, that shares every weight with the original.

Attention has to be told which tensors are shared between beams, and modules read such things from themselves
or from their config. Telling the user's own modules would leave state on them and break two calls at once. So each
call gets its own modules and configs: only those on the way to a module that holds a config are copied (shallowly,
some hundreds of small dictionaries: about a millisecond), with the original's own parameters. Nothing has to be undone
after the call, also not after an error.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn

from attmemo.fastseq.generate.streamed_linear import streamed

STATE = "_attmemo_fastseq"


def private_copy(
    model: Any,
    attention: str,
    state: object,
    also: Collection[str] = (),
) -> Any:
    """Copy the tree of modules that hold a config, and their configs.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Is not changed.
    attention : str
        Name of a registered attention function for the copy to use.
    state : object
        What the attention function finds on `module.config`.
    also : collection of str
        Names of classes whose modules, and the parents of those, are copied too, so that they can be exchanged.

    Returns
    -------
    transformers.PreTrainedModel
        Of the same class, with the same parameter objects.
    """
    return _Copier(attention, state, also).module(model)


def wears_another_forward(model: nn.Module) -> str | None:
    """Name of the first module whose `forward` was replaced on the instance (accelerate, a compiler), if any.

    Such a forward is bound to the original module: called through the copy it would run past the copy's children.
    """
    name: str
    for name, module in model.named_modules():
        own = vars(module)
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            return name
    return None


class _Copier:
    def __init__(self, attention: str, state: object, also: Collection[str]) -> None:
        self.attention = attention
        self.state = state
        self.also = also
        self.configs: dict[int, Any] = {}
        self.modules: dict[int, nn.Module] = {}

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        children = {name: child if child is None else self.module(child) for name, child in module._modules.items()}
        own = vars(module)
        unchanged = all(child is module._modules[name] for name, child in children.items())
        if not children and (stand_in := streamed(module)) is not None:
            self.modules[id(module)] = stand_in
            return stand_in
        if unchanged and not _is_config(own.get("config")) and type(module).__name__ not in self.also:
            self.modules[id(module)] = module
            return module
        twin = module.__class__.__new__(module.__class__)
        twin.__dict__.update(own)
        twin.__dict__["_modules"] = children
        for name in ("_buffers", "_non_persistent_buffers_set"):  # a rotary module may register others on the way
            twin.__dict__[name] = own[name].copy()
        for name, value in own.items():
            if _is_config(value):
                twin.__dict__[name] = self.config(value)
        self.modules[id(module)] = twin
        return twin

    def config(self, config: Any) -> Any:
        if id(config) in self.configs:
            return self.configs[id(config)]
        twin = copy.copy(config)
        self.configs[id(config)] = twin
        for name, value in list(vars(twin).items()):
            if _is_config(value):
                twin.__dict__[name] = self.config(value)
        # Not through the property: its setter also writes to the sub-configs, and those may be the original's.
        twin.__dict__["_attn_implementation_internal"] = self.attention
        twin.__dict__[STATE] = self.state
        return twin


def _is_config(value: object) -> bool:
    return hasattr(value, "_attn_implementation_internal")
