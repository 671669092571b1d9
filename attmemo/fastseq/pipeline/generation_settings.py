"""What a call of ``generate`` will be given, and how many tokens that leaves for a text and for its output."""

from __future__ import annotations

from typing import Any

from attmemo.errors import AttmemoError
from attmemo.fastseq.pipeline.model_properties import attribute, positions


class GenerationSettings:
    """Arguments of ``generate`` over the model's own generation configuration.

    Parameters
    ----------
    model : object with ``generate``
    config : PreTrainedConfig
        The model's.
    given : dict
        Arguments of ``generate``.
    """

    def __init__(self, model: Any, config: Any, given: dict[str, Any]) -> None:
        self.given = given
        self.causal = not bool(getattr(config, "is_encoder_decoder", False))
        self._model, self._config = model, config

    def get(self, name: str, otherwise: Any) -> Any:
        """An argument of ``generate``: as given, else as the model's own generation configuration has it."""
        given = self.given.get(name)
        if given is None:
            given = getattr(self.given.get("generation_config"), name, None)
        if given is None:
            given = getattr(attribute(self._model, "generation_config"), name, None)
        return otherwise if given is None else given

    def lengths(self) -> tuple[int | None, int | None]:
        """``max_new_tokens`` and ``max_length``: one of them, as ``generate`` chooses, and None."""
        configs = (self.given.get("generation_config"), attribute(self._model, "generation_config"))
        for settings in (self.given, *(vars(config) for config in configs if config is not None)):
            if settings.get("max_new_tokens") is not None:
                return int(settings["max_new_tokens"]), None
            if settings.get("max_length") is not None:
                return None, int(settings["max_length"])
        return 20, None  # the default of generate

    def new_tokens(self, source: int) -> int:
        """The most tokens that are generated for a text of `source` tokens."""
        new, total = self.lengths()
        if new is None:
            assert total is not None
            new = total - source if self.causal else total
        return max(1, new)

    def source_limit(self, asked: int | None, tokenizer: Any, truncate: bool) -> int | None:
        """The most tokens of a text: as asked, within what tokenizer and model take; None: any number."""
        most = positions(self._config)
        if self.causal:
            # A prompt stands in the positions of the tokens that follow it, and max_length counts both.
            new, total = self.lengths()
            room = min((value for value in (most, total) if value is not None), default=None)
            if room is not None:
                most = room - (1 if new is None else new)
                if most < 1:
                    raise AttmemoError(
                        f"{new or total:,} tokens to generate leave no room for a text: there are {room:,} positions.",
                        "fewer new tokens",
                    )
        if asked is not None and asked < 1:
            raise AttmemoError(f"texts cut to {asked} tokens are none.", "max_source at least 1")
        if asked is not None and most is not None and asked > most:
            raise AttmemoError(
                f"texts of {asked:,} tokens are asked for, the model takes {most:,}.", f"at most {most:,}"
            )
        known = getattr(tokenizer, "model_max_length", None)
        limits = [asked if asked is not None else known if truncate else None, most]
        # A tokenizer that knows no limit says 10^30.
        return min((limit for limit in limits if limit is not None and limit < 1 << 40), default=None)

    def named(self) -> dict[str, Any]:
        """The given arguments as JSON, for a run's identity."""
        return {f"generate {name}": _plain(value) for name, value in sorted(self.given.items())}


def _plain(value: Any) -> Any:
    """An argument as JSON keeps it; of an object, such as a processor, only the kind: its repr has an address."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "to_dict"):
        return {str(name): _plain(item) for name, item in value.to_dict().items()}
    return type(value).__name__
