"""Lines of log: plain, or one JSON object each. Texts of requests are in none of them."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class Lines(logging.Formatter):
    """Formats records; a record's `fields` are named values."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._json:
            whole = {"time": moment, "level": record.levelname.lower(), "logger": record.name, "message": text}
            return json.dumps(whole | fields, default=str)
        named = "".join(f" {name}={value}" for name, value in fields.items())
        return f"{moment} {record.levelname.lower()} {text}{named}"


def write_logs(level: str, as_json: bool) -> None:
    """Write lines of log to standard error: ours, and those of the server from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json))
    for name, least in (("attmemo", level.upper()), ("uvicorn", "WARNING"), ("", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if not name else []
        logger.setLevel(least)
