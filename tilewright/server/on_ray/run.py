"""`tilewright serve --ray`: starts replicas through Ray Serve, and serves them until a signal.

The server joins the cluster that RAY_ADDRESS names or that runs on this machine. If there is none, it starts one, which ends
with the server.
"""

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.on_ray.front import APP, DEPLOYMENT, front_on_ray
from tilewright.server.on_ray.replica import Replica
from tilewright.server.on_ray.scaling import Scaling
from tilewright.server.serve import run_server
from tilewright.server.starting import Starting

__all__ = ["resources_of", "serve_on_ray"]

STORE_BYTES = 128 << 20
"""Size of the object store of a cluster that is started here. It is small, because requests and answers only pass through."""
MOST_REQUESTS = 4096
"""Most requests that Ray sends to a replica at the same time. The replica's own queue has the effective limit."""


def resources_of(cluster: Mapping[str, float], replicas: int) -> tuple[dict[str, float], int]:
    """(resources that Ray reserves per replica, its number of threads; 0: not set).

    A replica gets one GPU if the cluster has any, otherwise its share of the cores.
    """
    if cluster.get("GPU", 0) >= 1:
        return {"num_cpus": 1, "num_gpus": 1}, 0
    cores = max(1, int(cluster.get("CPU", 1)) // replicas)
    return {"num_cpus": cores, "num_gpus": 0}, cores


def serve_on_ray(spec: dict[str, Any], config: ServerConfig, listener: socket.socket, log: Log) -> int:
    """Start replicas and serve them on a bound socket until a signal. Returns the exit code.

    Args:
        spec: see replica.py; without "folder", "server" and "threads".

    Raises:
        ValueError: no replica can be started.
    """
    most = config.max_replicas or config.replicas
    scaling = Scaling(least=config.replicas, most=most, down_after_s=config.scale_down_after_s)
    ours = _cluster(log)
    try:
        resources, threads = resources_of(ray.cluster_resources(), scaling.most)
        fields = ("max_body_bytes", "drain_timeout_s", "log_format", "tool_format", "max_wait_s", "traces")
        inner = {name: getattr(config, name) for name in fields} | {"port": 0, "log_level": "warning"}
        whole = {**spec, "folder": os.getcwd(), "server": inner, "threads": threads}
        deployment = serve.deployment(
            name=DEPLOYMENT,
            ray_actor_options=resources,
            max_ongoing_requests=MOST_REQUESTS,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            graceful_shutdown_timeout_s=config.drain_timeout_s,
            health_check_period_s=5,
            autoscaling_config=scaling.options(
                AutoscalingPolicy(policy_function="tilewright.server.on_ray.scaling:wanted_replicas")
            ),
        )(Replica)
        with Starting(config, listener, log.say, f"{spec['name']} in {scaling.least} to {scaling.most} replicas on Ray"):
            try:
                handle = serve.run(deployment.bind(whole), name=APP, route_prefix=None)
            except RuntimeError as error:
                raise ValueError(f"no replica could be started; {_why(error)}") from None
            about = handle.about.remote().result(timeout_s=60)
        return run_server(front_on_ray(handle, about, config), listener, log)
    finally:
        with suppress(RayError, RayServeException):  # the cluster may have ended already
            if serve.status().applications:
                serve.delete(APP)
            if ours:
                serve.shutdown()
        ray.shutdown()


def _cluster(log: Log) -> bool:
    """Join a cluster, or start one. Returns whether it was started here."""
    quiet = {"logging_level": logging.WARNING, "log_to_driver": True, "configure_logging": False}
    try:
        ray.init(address="auto", **quiet)
        log.say(f"Joined the Ray cluster at {ray.get_runtime_context().gcs_address}")
        ours = False
    except ConnectionError:
        ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        ours = True
    serve.start(proxy_location="Disabled")
    return ours


def _why(error: RuntimeError) -> str:
    """The last line of the replicas' messages that contains an error."""
    deployments = [one for app in serve.status().applications.values() for one in app.deployments.values()]
    lines = [line.strip() for one in deployments for line in one.message.splitlines() if "Error" in line]
    return (lines or [str(error)])[-1][:400]
