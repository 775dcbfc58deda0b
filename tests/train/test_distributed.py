import os
import subprocess
import sys
import time

import pytest

from olmo_core_jax.errors import CRASH, JobError, UserError
from olmo_core_jax.hardware.topology import Distributed, Topology
from olmo_core_jax.train import distributed


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_one_host_needs_nobody(env):
    assert distributed.cluster_arguments(Topology(), env) is None


@pytest.mark.parametrize(
    "env",
    [
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_PROCESS_ADDRESSES": "a:8476,b:8476", "TPU_WORKER_HOSTNAMES": "a"},
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
    ],
)
def test_gke_is_left_to_jax(env):
    assert distributed.cluster_arguments(Topology(), env) == {}
    off = Topology(distributed=Distributed(mode="off"))
    assert distributed.cluster_arguments(off, env) is None
    assert distributed.cluster_arguments(Topology(platform="cpu"), env) is None


def test_explicit_takes_its_number_from_the_environment():
    explicit = Distributed(mode="explicit", coordinator="h:1", num_processes=4)
    found = distributed.cluster_arguments(
        Topology(distributed=explicit), {"JOB_COMPLETION_INDEX": "3"}
    )
    assert found == {"coordinator_address": "h:1", "num_processes": 4, "process_id": 3}


@pytest.mark.parametrize("variable", ["JOB_COMPLETION_INDEX", "OLMO_PROCESS_ID"])
def test_a_number_without_others_is_refused(monkeypatch, variable):
    """It would take no lock, as it is not the first, and yet write, as JAX knows no other."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UserError, match=r"process is number 1 of several.*topology\.distributed"):
        distributed.initialize(Topology(platform="cpu"))
    distributed.initialize(Topology(distributed=Distributed(mode="off")))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_platform_that_is_not_there_is_named(platform):
    code = """
from olmo_core_jax.train import distributed
from olmo_core_jax.errors import UserError
try:
    distributed.describe()
except UserError as e:
    print(e)
"""
    env = os.environ | {"JAX_PLATFORMS": platform, "TPU_SKIP_MDS_QUERY": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert f"topology.platform {platform}: JAX cannot use it here" in run.stdout, run.stderr


def test_explicit_without_an_address_is_refused():
    with pytest.raises(UserError, match=r"topology\.distributed\.coordinator is needed"):
        distributed.cluster_arguments(Topology(distributed=Distributed(mode="explicit")), {})


def test_a_name_that_never_resolves_is_named_in_time():
    began = time.monotonic()
    with pytest.raises(JobError, match=r"host no-such-host\.invalid cannot be resolved") as error:
        distributed._await_name("no-such-host.invalid:1234", 1)
    assert error.value.exit_code == CRASH  # counted, and started again
    assert time.monotonic() - began < 20


def test_a_name_that_resolves_late_is_waited_for(monkeypatch):
    import socket

    calls = []

    def late(host, port):
        calls.append(host)
        if len(calls) < 3:
            raise socket.gaierror("not yet")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(time, "sleep", lambda s: None)
    distributed._await_name("coordinator:1234", 60)
    assert calls == ["coordinator"] * 3
