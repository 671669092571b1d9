"""The service of `attmemo serve` as a deployment of Ray Serve: more replicas when more requests wait."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from attmemo.arguments import AUTO, MEMORY
from attmemo.errors import AttmemoError
from attmemo.ray.replica import ensure_local, is_uri
from attmemo.serve.settings import Settings
from attmemo.system.extras import install

if TYPE_CHECKING:
    from attmemo.serve.service import Service

AUTOSCALING: Final[Mapping[str, Any]] = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 32}
"""A replica batches what waits: 32 single texts make a full forward."""

_started: list[Service] = []  # a process of Ray has one replica


class Replica:
    """One replica: the service of one model, with the routes of `attmemo serve`."""

    def __init__(self, settings: Settings, cache: str | None) -> None:
        from attmemo.serve.service import Service

        database = settings.database
        if database not in (None, MEMORY, AUTO) and (is_uri(database) or cache is not None):
            settings = replace(settings, database=str(ensure_local(database, cache)))
        self._service = Service(settings).start()
        _started[:] = [self._service]

    def check_health(self) -> None:
        """Asked by Ray: a replica that raises is replaced. A forward that failed is no reason; a dead thread is."""
        if not self._service.alive:
            raise RuntimeError("the model's thread ended")

    def __del__(self) -> None:
        with suppress(AttributeError):  # it was never started
            self._service.draining = True
            self._service.close()


def application(settings: Settings, *, cache: str | None = None, **options: Any) -> Any:
    """An application for ``ray.serve.run``.

    Parameters
    ----------
    settings : attmemo.serve.Settings
        As of `attmemo serve`. A database with a URI is replicated on each node first, see `ensure_local`; a database
        that fills itself is shared by the replicas of a node.
    cache : str, optional
        Directory of replicas of databases on each node; with it, a path is replicated too.
    **options
        Of ``ray.serve.deployment``: ``ray_actor_options={"num_cpus": 8}``, ``autoscaling_config``, …

    Raises
    ------
    AttmemoError
        Ray Serve, or a part of the extra ``serve``, is not installed.
    """
    try:
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import sentence_transformers  # noqa: F401
        from ray import serve
    except ImportError as error:
        raise AttmemoError(f"{error.name} is not installed.", install("ray")) from error

    def mount() -> Any:
        # Called in the replica, behind its constructor.
        from attmemo.ray.service import _started as started
        from attmemo.serve.app import make_app

        return make_app(started[0])

    # Requests over the limit get status 429 from the service itself, as without Ray; so Ray's limit is far above.
    options = {
        "name": "attmemo", "max_ongoing_requests": 2 * settings.max_concurrent_requests,
        "ray_actor_options": {"num_cpus": 1}, "graceful_shutdown_timeout_s": settings.stop_seconds,
    } | options  # fmt: skip
    if "num_replicas" not in options:
        options.setdefault("autoscaling_config", dict(AUTOSCALING))
    return serve.deployment(**options)(serve.ingress(mount)(Replica)).bind(settings, cache)
