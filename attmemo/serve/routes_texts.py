"""Routes of the tokenizer: ``/tokenize`` and ``/decode``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from attmemo.serve import answers, bodies
from attmemo.serve.http import Route, reply, reply_list
from attmemo.serve.refusal import Refusal
from attmemo.serve.service import Service
from attmemo.serve.texts import too_many

TOKENS: Final = 1 << 17
"""Tokens of a request, at most. ``/tokenize`` shows each in some 65 bytes."""
PART: Final = 1000
"""Tokens that are shown at once: Python's lock is not let go meanwhile."""


def routes(service: Service) -> list[Route]:
    """Routes of the tokenizer."""

    async def tokenize(body: bodies.TokenizeRequest, request: Request) -> Response:
        texts = [str(one) for one in body.inputs.items]
        if not texts:
            raise Refusal("empty", "`inputs` cannot be empty")
        special, prompt, take, shown = body.add_special_tokens, body.prompt_name, request.state.hold, 0

        def work(piece: Sequence[str]) -> list[tuple[int, bytes]]:
            return [_shown(service, text, special, prompt) for text in piece]

        def seen(made: list[tuple[int, bytes]]) -> None:
            nonlocal shown
            shown += sum(count for count, _ in made)
            if shown > TOKENS:
                raise too_many(TOKENS)
            take(sum(len(part) for _, part in made))

        made = await service.show(texts, work, "tokenize", seen)
        return await reply_list(part for _, part in made)

    async def decode(body: bodies.DecodeRequest, request: Request) -> Response:
        lists: list[list[int]] = [list(ids) for ids in body.ids.items]  # type: ignore[arg-type]
        if not lists:
            raise Refusal("empty", "`ids` cannot be empty")
        if sum(map(len, lists)) > TOKENS:
            raise too_many(TOKENS)

        def work(piece: Sequence[list[int]]) -> list[str]:
            return [service.texts.decode(ids, skip_special=body.skip_special_tokens) for ids in piece]

        return reply(await service.show(lists, work, "decode"))

    return [
        Route(("/tokenize",), bodies.TokenizeRequest, tokenize, "Tokens of texts", answers.TokenizeResponse),
        Route(("/decode",), bodies.DecodeRequest, decode, "Texts of token ids", answers.DecodeResponse),
    ]


def _shown(service: Service, text: str, special: bool, prompt: str | None) -> tuple[int, bytes]:
    """The number of tokens of a text, and the JSON that shows them."""
    count, parts = 0, list[bytes]()
    for part in service.texts.describe(text, special=special, prompt=prompt, most=TOKENS, at_once=PART):
        count += len(part)
        parts.append(orjson.dumps(part)[1:-1])
    return count, b"[" + b",".join(parts) + b"]"
