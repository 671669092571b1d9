"""`attmemo serve`: an HTTP service of one model."""

from __future__ import annotations

import ipaddress
import os
from typing import Annotated, Any, Literal

import typer

from attmemo.cli.console import output
from attmemo.cli.options import Precision, choose, parse_cosine, parse_share, parse_size, parse_threshold, precision
from attmemo.system.extras import check_installed

HOST = "127.0.0.1"


def _named(env: str, text: str, **more: Any) -> Any:
    """An option that an environment variable may set too."""
    return typer.Option(envvar=env, help=text, show_envvar=True, **more)


def parse_budget(text: str) -> float | None:
    """A share, 0, or ``none``."""
    return None if text == "none" else 0.0 if text in ("0", "0.0") else parse_share(text)


def parse_fill(text: str) -> bool | str:
    """``yes``, ``no``, or a folder."""
    return {"yes": True, "no": False}.get(text, text)


NOTHING: Any = "0"  # a default is parsed, and shown, like a value that is given
AUTO: Any = "auto"
YES: Any = "yes"
POSITIVE: Any = {"metavar": "N", "min": 1}


def serve(
    model: Annotated[str, typer.Argument(
        metavar="MODEL", envvar="MODEL_ID", show_default=False, help="Model directory, or name on the model hub."
    )],
    host: Annotated[str | None, typer.Option(
        "--host", "--hostname", metavar="ADDRESS", show_default=False,
        help="Address to listen on; 0.0.0.0: all of this machine.  "
        f"[env var: HOSTNAME, if it is an address; default: {HOST}]",
    )] = None,
    port: Annotated[int, _named("PORT", "Port to listen on.", min=0, max=65535)] = 3000,
    database: Annotated[str | None, _named(
        "ATTMEMO_DATABASE",
        "Database directory; with a budget one is begun there that fills itself. :memory: keeps records in memory, "
        "auto: in the cache directory.  [default: with a budget memory, else none]",
        metavar="DIR", show_default=False,
    )] = None,
    reuse: Annotated[Literal["auto", "rows", "maps", "prefix", "local", "none"], _named(
        "ATTMEMO_REUSE", "What records supply; prefix: of causal models what texts begin with, exactly, in memory; "
        "local: of encoders with local layers alone what is far from every edit, as exactly; none: every answer is "
        "computed, without padding."
    )] = "auto",
    linear: Annotated[Literal["auto", "exact", "int8"], _named(
        "LINEAR", "Arithmetic of linear layers; int8: faster, answers are near the exact ones; auto: exact, or with a "
        "budget int8 where it is faster and proven to keep the budget."
    )] = "auto",
    budget: Annotated[Any, _named(
        "ATTMEMO_BUDGET",
        "Share of answers that reuse of similar inputs may change, at most. 0: every answer is computed; none: "
        "records of a prepared database are reused unguarded.", parser=parse_budget, metavar="SHARE",
    )] = NOTHING,
    confidence: Annotated[float, _named(
        "ATTMEMO_CONFIDENCE", "How sure the budget is kept.", parser=parse_share, metavar="SHARE"
    )] = 0.95,
    min_cosine: Annotated[float, _named(
        "ATTMEMO_MIN_COSINE", "Of embeddings: one whose cosine to the exact one is lower counts as changed.",
        parser=parse_cosine, metavar="C",
    )] = 0.98,
    threshold: Annotated[Any, _named(
        "ATTMEMO_THRESHOLD",
        "With --reuse rows: share of its tokens that a record must supply to a text; auto: 0.5. Maps: similarity that "
        "a record must have; auto: what attmemo tune chose.", parser=parse_threshold, metavar="T",
    )] = AUTO,
    near: Annotated[int | None, _named(
        "ATTMEMO_NEAR",
        "Of rows: neighbours of each changed token that are recomputed too, on both sides; more bring answers nearer "
        "to the exact ones.  [default: as attmemo.memoize chooses]", metavar="N", min=0, show_default=False,
    )] = None,
    max_bytes: Annotated[Any, _named(
        "ATTMEMO_MAX_BYTES", "Bytes that new records may take: 8GiB, 500MB.  [default: an eighth of the free memory]",
        parser=parse_size, metavar="SIZE", show_default=False,
    )] = None,
    fill: Annotated[Any, _named(
        "ATTMEMO_FILL", "Whether exact answers become records: yes, no, or the directory that they go to.",
        parser=parse_fill, metavar="yes|no|DIR",
    )] = YES,
    shadow: Annotated[bool, _named(
        "ATTMEMO_SHADOW", "Give exact answers only, and find in idle times what the budget would reuse and change."
    )] = False,
    log_changes: Annotated[str | None, _named(
        "ATTMEMO_LOG_CHANGES",
        "File that gets a line for each verified answer that had changed: hashes and numbers, no text.",
        metavar="FILE", show_default=False,
    )] = None,
    namespaces: Annotated[int, _named(
        "ATTMEMO_NAMESPACES",
        "Namespaces that requests may name in the header x-attmemo-namespace: each has records and a guard of its "
        "own. 0: the header is refused.", metavar="N", min=0,
    )] = 0,
    served_model_name: Annotated[str | None, _named(
        "SERVED_MODEL_NAME",
        "Name of the model that clients see.  [default: that on the hub, or the last name of the directory]",
        metavar="NAME", show_default=False,
    )] = None,
    dtype: Annotated[Precision, precision("Type of the weights.", envvar="DTYPE", show_envvar=True)] = "float32",
    pooling: Annotated[Literal["mean", "cls", "last-token"] | None, _named(
        "POOLING", "How embeddings are pooled.  [default: as the model's configuration says, else the mean]",
        show_default=False,
    )] = None,
    default_prompt: Annotated[str | None, _named(
        "DEFAULT_PROMPT", "Text to put before every text.", metavar="TEXT", show_default=False
    )] = None,
    default_prompt_name: Annotated[str | None, _named(
        "DEFAULT_PROMPT_NAME", "The same, by its name in the model's configuration.", metavar="NAME",
        show_default=False,
    )] = None,
    max_batch_tokens: Annotated[int, _named(
        "MAX_BATCH_TOKENS", "Tokens that one forward computes, at most; tokens that a record supplies do not count.",
        **POSITIVE,
    )] = 2048,
    max_batch_requests: Annotated[int | None, _named(
        "MAX_BATCH_REQUESTS", "Sequences in one forward, at most.  [default: no limit]", show_default=False,
        **POSITIVE,
    )] = None,
    max_concurrent_requests: Annotated[int, _named(
        "MAX_CONCURRENT_REQUESTS", "Sequences in the service at a time; more are refused with 429.", **POSITIVE
    )] = 512,
    max_client_batch_size: Annotated[int, _named(
        "MAX_CLIENT_BATCH_SIZE", "Sequences in one request, at most.", **POSITIVE
    )] = 1024,
    auto_truncate: Annotated[bool, _named(
        "AUTO_TRUNCATE", "Cut inputs that are too long, unless a request says otherwise."
    )] = True,
    payload_limit: Annotated[int, _named("PAYLOAD_LIMIT", "Bytes of a request, at most.", **POSITIVE)] = 2_000_000,
    tokenization_workers: Annotated[int | None, _named(
        "TOKENIZATION_WORKERS", "Threads for texts.  [default: a quarter of the cores]", show_default=False,
        **POSITIVE,
    )] = None,
    api_key: Annotated[str | None, _named(
        "API_KEY", "Key that requests must bring; better set as a variable: others see a command line.",
        metavar="KEY", show_default=False,
    )] = None,
    row_headers: Annotated[bool, _named(
        "ATTMEMO_ROW_HEADERS",
        "Response headers say how many tokens were recomputed. They tell whether a similar text was asked before.",
    )] = False,
    drain_seconds: Annotated[float, _named(
        "ATTMEMO_DRAIN_SECONDS", "After SIGTERM, seconds that /health says 503 and requests are still taken.", min=0.0
    )] = 1.0,
    json_output: Annotated[bool, _named("JSON_OUTPUT", "Log lines as JSON.")] = False,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _named(
        "LOG_LEVEL", "Least level of log lines; debug has one for every request."
    )] = "info",
) -> None:  # fmt: skip
    """Serve a model over HTTP: embeddings, classes, relevance.

    The wire format is that of text-embeddings-inference, and of OpenAI for embeddings.

    Every answer is computed. With --budget 0.01 it reuses what similar texts have computed, and proves that at most
    1 % of the answers change; of embeddings where --database or --reuse rows asks for it. The first page to look at is
    http://localhost:3000/. SIGTERM answers what is in work and closes the database.
    """
    given = dict(locals())
    with output(None, quiet=False, interrupted="ended") as out:
        from attmemo.serve.settings import Settings

        settings = choose(Settings, given)
        check_installed("serve", "fastapi", "orjson", "prometheus_client", "sentence_transformers", "uvicorn")
        out.say(f"loading {settings.model} …")  # before libraries, which take seconds to load too
        from attmemo.serve.logs import write_logs
        from attmemo.serve.server import listen, serve, url_of
        from attmemo.serve.service import Service

        place = listen(host or _hostname(), port)
        write_logs(log_level, json_output)
        service = Service(settings).start()
        layers = ", int8 linear layers" if settings.linear == "int8" else ""
        out.say(f"{settings.name}: {service.model.task}, reuse {service.model.reuse}{layers}; {url_of(place)}")
        serve(service, place)


def _hostname() -> str:
    """The variable HOSTNAME, if it is an address: shells and containers set it to the machine's name."""
    name = os.environ.get("HOSTNAME", "")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return HOST
    return name
