"""Several processes, one job: joined before JAX is asked for its devices; each says who it is."""

import logging
import os
import socket
import time
from collections.abc import Mapping

import jax

from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.hardware.topology import Distributed, Topology, process_id

log = logging.getLogger(__name__)


def initialize(topology: Topology) -> None:
    """Joins the other processes where there are any, before anything touches jax.devices().

    Raises JobError, which names it, where no coordinator answers within topology.distributed.wait_seconds: a host that
    is repaired, or an image that is slow to come, is no mistake of the user's, and another start may help.
    """
    arguments = cluster_arguments(topology)
    if arguments is None:
        # Alone, it would train and write beside the process that owns the folder.
        if process_id(topology) != 0:
            raise UserError(
                f"this process is number {process_id(topology)} of several, but is not told of the others: set "
                "topology.distributed (mode explicit with coordinator and num_processes, or mode off)"
            )
        return
    # Whoever gets a SIGTERM tells the others in the loop; JAX's own service would take the signal.
    jax.config.update("jax_enable_preemption_service", False)
    wait = topology.distributed.wait_seconds
    if "coordinator_address" in arguments:
        _await_name(arguments["coordinator_address"], wait)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=wait,
            heartbeat_timeout_seconds=topology.distributed.heartbeat_seconds,
        )
    except RuntimeError as e:
        where = arguments.get("coordinator_address", "the coordinator that the environment names")
        raise JobError(f"no contact with {where} within {wait} s: {e}") from None
    if jax.process_index() != process_id(topology):  # it decides who writes: two writers never
        raise UserError(
            f"this process took itself for number {process_id(topology)}, but the cluster counts "
            f"it as {jax.process_index()}: set topology.distributed.process_id"
        )


def cluster_arguments(topology: Topology, env: Mapping[str, str] = os.environ) -> dict | None:
    """What jax.distributed.initialize is called with; None for one process alone."""
    d = topology.distributed
    if d.mode == "off":
        return None
    if d.mode == "explicit":
        _require(d)
        return {
            "coordinator_address": d.coordinator,
            "num_processes": d.num_processes,
            "process_id": process_id(topology, env),
        }
    # GKE injects these for a TPU slice and JAX reads them itself; one host needs no coordinator.
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES", "")
    slices = int(env.get("MEGASCALE_NUM_SLICES", "1"))
    if topology.platform == "cpu" or len(hosts.split(",")) * slices < 2:
        return None
    return {}


def leave() -> None:
    """Parts from the other processes once all have come to their end: nobody sees anybody die."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()


def describe() -> str:
    """Who this process is among all, and what it can use. Raises UserError where JAX has no device of the platform."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:
        why = str(e).partition("\n")[0] or type(e).__name__
        raise UserError(
            f"topology.platform {os.environ.get('JAX_PLATFORMS', 'default')}: JAX cannot use it here ({why}); "
            "install its extra (pip install -e '.[cuda]' or '.[tpu]'), or choose cpu"
        ) from None
    kinds = sorted({d.device_kind for d in jax.local_devices()})
    return (
        f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()} "
        f"(pid {os.getpid()}): {jax.local_device_count()} of {jax.device_count()} devices, "
        f"{', '.join(kinds)}, jax {jax.__version__}"
    )


def _require(d: Distributed) -> None:
    for field in ("coordinator", "num_processes"):
        if getattr(d, field) is None:
            raise UserError(f"topology.distributed.{field} is needed with mode explicit")


def _await_name(address: str, seconds: float) -> None:
    """Waits until the coordinator's name resolves: pods start in any order."""
    host = address.rpartition(":")[0]
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as e:
            if time.monotonic() > deadline:
                raise JobError(f"host {host} cannot be resolved after {seconds} s: {e}") from None
            time.sleep(1)
