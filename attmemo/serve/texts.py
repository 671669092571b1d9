"""Texts to token ids and back, the same as the model's own tokenizer does, in many threads at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tokenizers import Encoding, Tokenizer

from attmemo.errors import DataError, UnsupportedModelError
from attmemo.serve.refusal import Refusal

Side = Literal["left", "right"]
Input = str | tuple[str, str] | list[int]

CHARACTERS: Final = 250
"""Characters that are read for each token that the model takes, at most; as TEI."""

SHORT: Final = 1000
"""Characters of a text that is tokenized where it was read: a way to a thread and back takes longer, 100 microseconds.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One input, ready for the model."""

    ids: list[int]
    types: list[int]
    characters: int
    places: Sequence[tuple[int, int]] = ()  # where each token begins and ends among them, where asked for


class Texts:
    """The tokenizer of one model, which takes `longest` tokens and has `vocabulary` token ids.

    `prompts` are texts to put before others, by name; `prompt` is put before all texts, if a request names none.
    """

    def __init__(
        self, tokenizer: Any, longest: int, vocabulary: int, prompts: Mapping[str, str], prompt: str = ""
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: threads cannot share it.",
                "save the model with a tokenizer.json",
            )
        # Rules of the tokenizer are not settings of one call: a copy without truncation and padding, one for each way
        # to cut. A change of a tokenizer that other threads use is an error of the library.
        self._rules = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
        self._ways: dict[Side | None, Tokenizer] = {}
        self._lock = threading.Lock()
        self.longest, self._vocabulary = longest, vocabulary
        self._prompts, self._prompt = dict(prompts), prompt
        self.way(None), self.way("right")  # now, and not in a request: it takes tens of milliseconds

    def encode(
        self, given: Input, *, truncate: bool, side: Side = "right", prompt: str | None = None, special: bool = True,
        placed: bool = False,
    ) -> Tokens:  # fmt: skip
        """Token ids of a text, a pair of texts, or ids as they are; a `Refusal` if the model cannot take them.

        `placed`: also where the tokens of a text lie in it; no prompt stands before it.
        """
        if isinstance(given, list):
            return self._given(given, truncate, side, prompt)
        characters = len(given) if isinstance(given, str) else len(given[0]) + len(given[1])
        found = self._encode(given, side if truncate else None, prompt, special)
        self._check_length(len(found.ids))
        if not placed:
            return Tokens(found.ids, found.type_ids, characters)
        left_out = max(0, characters - self.longest * CHARACTERS) if truncate and side == "left" else 0
        places = [(start + left_out, stop + left_out) for start, stop in found.offsets]
        return Tokens(found.ids, found.type_ids, characters, places)

    def describe(
        self, text: str, *, special: bool, prompt: str | None, most: int, at_once: int
    ) -> Iterator[list[dict[str, Any]]]:
        """The tokens of a text, as the route ``/tokenize`` shows them; `start` and `stop` count characters.

        So many come at a time. A `Refusal` if there are more than `most`.
        """
        found = self._encode(text, None, prompt, special)
        if len(found) > most:
            raise too_many(most)
        whole, way = self._before(prompt) + text, self.way(None)
        tokens = list(zip(found.ids, found.special_tokens_mask, found.offsets, strict=True))
        for first in range(0, len(tokens), at_once):
            yield [
                {"id": number, "special": True, "text": way.id_to_token(number) or "", "start": None, "stop": None}
                if mark else
                {"id": number, "special": False, "text": whole[start:stop], "start": start, "stop": stop}
                for number, mark, (start, stop) in tokens[first : first + at_once]
            ]  # fmt: skip

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        """The text of token ids."""
        if not ids:
            raise Refusal("empty", "`input_ids` cannot be empty")
        self._check_ids(ids)
        return str(self.way(None).decode_batch([ids], skip_special_tokens=skip_special)[0])

    def way(self, side: Side | None) -> Tokenizer:
        """The tokenizer that cuts on this side, or not at all; it is never changed."""
        found = self._ways.get(side)
        if found is None:
            with self._lock:
                found = Tokenizer.from_str(self._rules)
                if side is not None:
                    found.enable_truncation(self.longest, direction=side)
                self._ways[side] = found
        return found

    def _encode(self, given: str | tuple[str, str], side: Side | None, prompt: str | None, special: bool) -> Encoding:
        parts: list[str] = [given] if isinstance(given, str) else list(given)
        if not any(parts):
            raise Refusal("empty", "`inputs` cannot be empty")
        limit = self.longest * CHARACTERS
        if (seen := sum(map(len, parts))) > limit:
            if side is None:
                raise Refusal("validation", f"`inputs` must have less than {limit} characters. Given: {seen}")
            parts = [part[:limit] if side == "right" else part[-limit:] for part in parts]
        if len(parts) == 2 and prompt is not None:
            raise Refusal("validation", "`prompt_name` cannot be set with dual inputs")
        before = self._before(prompt) if len(parts) == 1 else ""
        try:
            whole = before + parts[0] if len(parts) == 1 else (parts[0], parts[1])
            return self._tokenized(whole, side, special)
        except Exception as error:  # the library raises plain exceptions
            raise Refusal("tokenizer", f"Tokenization error: {error}") from None

    def _tokenized(self, given: str | tuple[str, str], side: Side | None, special: bool = True) -> Encoding:
        """A long text, as a batch: only so the library lets other threads of Python run meanwhile."""
        way = self.way(side)
        if isinstance(given, str) and len(given) <= SHORT:
            return way.encode(given, add_special_tokens=special)
        return way.encode_batch([given], add_special_tokens=special)[0]

    def _given(self, ids: list[int], truncate: bool, side: Side, prompt: str | None) -> Tokens:
        if not ids:
            raise Refusal("empty", "`inputs` cannot be empty")
        self._check_ids(ids)
        characters = len(ids)  # as TEI counts them
        if before := self._before(prompt):
            limit = self.longest * CHARACTERS
            if len(ids) > limit and not truncate:
                self._check_length(len(ids))
            first = side == "right"
            text = self.decode(ids[:limit] if first else ids[-limit:], skip_special=True)
            if truncate:
                text = text[:limit] if first else text[-limit:]
            found = self._tokenized(before + text, side if truncate else None)
            self._check_length(len(found.ids))
            return Tokens(found.ids, found.type_ids, characters)
        if truncate:
            ids = ids[: self.longest] if side == "right" else ids[-self.longest :]
        self._check_length(len(ids))
        return Tokens(ids, [0] * len(ids), characters)

    def _before(self, prompt: str | None) -> str:
        if prompt is None:
            return self._prompt
        if prompt not in self._prompts:
            known = ", ".join(sorted(self._prompts)) or "none"
            raise Refusal("validation", f"`prompt_name` is not one of the model's prompts: {known}")
        return self._prompts[prompt]

    def _check_length(self, seen: int) -> None:
        if seen > self.longest:
            raise Refusal("validation", f"`inputs` must have less than {self.longest} tokens. Given: {seen}")

    def _check_ids(self, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise Refusal("tokenizer", f"token ids must be below {self._vocabulary}, and not negative")


def too_many(most: int) -> Refusal:
    """A request has more tokens than are shown at a time."""
    return Refusal("validation", f"a request must have less than {most} tokens in all: send it in parts")


def default_prompt(prompts: Mapping[str, str], text: str | None, name: str | None) -> str:
    """The prompt that is put before all texts; DataError if the model has none of this name."""
    if name is None:
        return text or ""
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "it has none"
        raise DataError(
            f"the model has no prompt of the name {name!r}; its prompts: {known}.", "--default-prompt TEXT"
        )
    return prompts[name]
