"""An ASGI app on a Ray cluster, by Ray Serve: each replica builds the app, and batches inside it.

`serve.batch` is not used: the app shares batches itself. Ray Serve's proxy adds its own time to each request, so this
is for several nodes and for autoscaling; one machine is served faster by a process of its own.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from torchlake.engines._ray_cluster import ProcessResources
from torchlake.errors import MissingExtra, UsageError, pip_install
from torchlake.processes.environment import keep_freed_memory
from torchlake.processes.serialization import pack, unpack

log = logging.getLogger(__name__)


def deploy(
    build: Callable[[], Any],
    *,
    name: str,
    share: ProcessResources,
    replicas: int,
    autoscaling: Mapping[str, Any],
    address: tuple[str, int],
    most: int,
    drain_s: float,
) -> Callable[[], None]:
    """Run the app that `build` returns on replicas, each with `share`; return a function that ends them.

    `autoscaling` are Ray's settings, such as `max_replicas`; without them there are `replicas`. `most` is the number of
    requests that a replica answers at the same time; it refuses as many more with 429, before Ray does with 503.
    A Ray Serve that runs already keeps its address and its other applications: this one is at `/name`. Raises
    MissingExtra without Ray Serve, and UsageError for settings that it does not know, or a name that is taken.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtra(f"Ray Serve needs {error.name!r}: {pip_install('ray[serve]')}") from None
    payload = pack(build)

    def make() -> Any:
        keep_freed_memory()
        (made,) = unpack(payload)
        return made()

    @serve.ingress(make)
    class Replica:
        """One process with the model."""

        def check_health(self) -> None:
            """Raise RuntimeError if the model hangs: Ray then replaces the replica."""
            hung = self.app.state.service.hung  # type: ignore[attr-defined]
            if hung is not None:
                raise RuntimeError(hung)

    before = serve.status()
    runs = bool(before.proxies or before.applications)
    if name in before.applications:
        raise UsageError(f"Ray Serve has an application {name!r} already: choose another one with --name.")
    prefix = f"/{quote(name)}" if before.applications else "/"
    number: dict[str, Any] = {"autoscaling_config": dict(autoscaling)} if autoscaling else {"num_replicas": replicas}
    host, port = address
    try:
        deployment: Any = serve.deployment(
            Replica,
            name=name,
            ray_actor_options={**share.options, "runtime_env": {"env_vars": share.variables}},
            max_ongoing_requests=2 * most,
            max_queued_requests=most,
            graceful_shutdown_timeout_s=drain_s,
            **number,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"engine.ray.autoscaling: {' '.join(str(error).split())}") from None
    if not runs:
        serve.start(http_options={"host": host, "port": port})

    def end() -> None:
        serve.delete(name)
        if not runs and not serve.status().applications:
            serve.shutdown()

    try:
        serve.run(deployment.bind(), name=name, route_prefix=prefix)
    except BaseException:
        end()
        raise
    place = "the address that Ray Serve has" if runs else f"http://{host}:{port}"
    log.info("%s is served by Ray Serve at %s, path %s", name, place, prefix)
    return end
