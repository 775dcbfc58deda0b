"""Topologies that cannot be: one line that names the field, before anything waits or starts."""

import json

import pytest

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import load_topology
from olmo_core_jax.launch.profile import load_profile


def refusal(given: str) -> str:
    with pytest.raises(UserError) as e:
        load_topology(given)
    said = str(e.value)
    assert "\n" not in said and said.startswith("topology ")
    return said


@pytest.mark.parametrize(
    "given", ["{bad", "{\n'bad\n", "{a: {b: 1}", "{d: 2024-99-99}", "{a: \x00}"]
)
def test_a_malformed_inline_topology_is_told_on_one_line(given):
    assert "is not valid YAML" in refusal(given)


@pytest.mark.parametrize("given", ["[]", "- 1", "0", "text"])
def test_a_topology_is_a_mapping(tmp_path, given):
    (tmp_path / "t.yaml").write_text(given)
    assert "dictionary" in refusal(str(tmp_path / "t.yaml"))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"remat: caf\xe9")
    for name in ("latin", "absent", ""):
        assert "cannot be read" in refusal(str(tmp_path / name))
    (tmp_path / "empty").write_text("")
    assert load_topology(str(tmp_path / "empty")) == load_topology(None)


@pytest.mark.parametrize("coordinator", ["", "node-0", "node-0:", ":8476", "node-0:http", " :1"])
def test_a_coordinator_without_a_host_or_port(coordinator):
    said = refusal(json.dumps({"distributed": {"mode": "explicit", "coordinator": coordinator}}))
    assert f"topology.distributed.coordinator: {coordinator!r} is not HOST:PORT" in said


@pytest.mark.parametrize(("number", "processes"), [(2, 2), (7, 4)])
def test_a_process_that_nobody_counts_on(number, processes):
    each = {"mode": "explicit", "coordinator": "[::1]:8476", "num_processes": processes}
    load_topology(json.dumps({"distributed": each | {"process_id": processes - 1}}))
    said = refusal(json.dumps({"distributed": each | {"process_id": number}}))
    assert (
        f"topology.distributed.process_id: {number} is not one of num_processes {processes}" in said
    )


def test_a_key_given_twice_is_refused_with_its_line(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("mesh:\n  fsdp: 2\n  tensor: 1\n  fsdp: 4\n")
    assert "line 4, column 3: key 'fsdp' is given twice" in refusal(str(path))
    path.write_text("name: x\nmax_restarts: 1\nmax_restarts: 2\n")
    with pytest.raises(UserError, match=r"launch profile .*line 3, column 1: key 'max_restarts'"):
        load_profile(str(path))
