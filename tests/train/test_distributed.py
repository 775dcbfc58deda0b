import time

import pytest

from olmo_core_jax.errors import CRASH, JobError, UserError
from olmo_core_jax.topology import Distributed, Topology
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
