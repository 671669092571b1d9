"""Routes of the tokenizer: ``/tokenize`` and ``/decode``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from attmemo.serve import answers, bodies
from attmemo.serve.http import Route, reply
from attmemo.serve.refusal import Refusal
from attmemo.serve.service import Service


def routes(service: Service) -> list[Route]:
    """Routes of the tokenizer."""

    def check(count: int, name: str) -> None:
        most = service.settings.max_client_batch_size
        if not count:
            raise Refusal("empty", f"`{name}` cannot be empty")
        if count > most:
            what = f"batch size {count} > maximum allowed batch size {most}"
            raise Refusal("validation", what, reason="batch_size")

    async def tokenize(body: bodies.TokenizeRequest, request: Request) -> Response:
        check(len(body.inputs.items), "inputs")

        def work() -> list[Any]:
            special, prompt = body.add_special_tokens, body.prompt_name
            return [service.texts.describe(str(one), special=special, prompt=prompt) for one in body.inputs.items]

        return reply(await service.in_thread(work))

    async def decode(body: bodies.DecodeRequest, request: Request) -> Response:
        check(len(body.ids.items), "ids")

        def work() -> list[str]:
            skip = body.skip_special_tokens
            return [service.texts.decode(list(ids), skip_special=skip) for ids in body.ids.items]  # type: ignore[arg-type]

        return reply(await service.in_thread(work))

    return [
        Route(("/tokenize",), bodies.TokenizeRequest, tokenize, "Tokens of texts", answers.TokenizeResponse),
        Route(("/decode",), bodies.DecodeRequest, decode, "Texts of token ids", answers.DecodeResponse),
    ]
