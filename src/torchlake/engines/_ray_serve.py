"""An ASGI app on a Ray cluster, by Ray Serve: each replica builds the app, and batches inside it.

`serve.batch` is not used: the app shares batches itself. Ray Serve's proxy adds its own time to each request, so this
is for several nodes and for autoscaling; one machine is served faster by a process of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torchlake.engines._ray_cluster import ProcessResources
from torchlake.errors import MissingExtra, UsageError, pip_install
from torchlake.processes.serialization import pack, unpack


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
    requests that a replica answers at the same time. Raises MissingExtra without Ray Serve, and UsageError for settings
    that it does not know.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtra(f"Ray Serve needs {error.name!r}: {pip_install('ray[serve]')}") from None
    payload = pack(build)

    def make() -> Any:
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

    number: dict[str, Any] = {"autoscaling_config": dict(autoscaling)} if autoscaling else {"num_replicas": replicas}
    host, port = address
    serve.start(http_options={"host": host, "port": port})
    try:
        deployment: Any = serve.deployment(
            Replica,
            name=name,
            ray_actor_options={**share.options, "runtime_env": {"env_vars": share.variables}},
            max_ongoing_requests=most,
            graceful_shutdown_timeout_s=drain_s,
            **number,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"engine.ray.autoscaling: {' '.join(str(error).split())}") from None
    serve.run(deployment.bind(), name=name, route_prefix="/")

    def end() -> None:
        serve.delete(name)
        serve.shutdown()

    return end
