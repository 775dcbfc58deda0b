"""A whole laboratory: API server, cluster, a job, and launchers whose patience is measured in milliseconds."""

import contextlib
import sys
import threading
import time
from pathlib import Path

from olmo_core_jax.launch.gke import logs
from olmo_core_jax.launch.gke.watch import Launcher
from olmo_core_jax.launch.job import Job
from olmo_core_jax.launch.profile import Profile

from .cluster import Cluster
from .kubelet import Kubelet
from .server import ApiServer
from .store import Store

STANDIN = Path(__file__).with_name("standin.py")
SLEEP_SCALE = 0.004
logs.RETRY_SECONDS = 0.03


class Killed(BaseException):
    """The controller process died at this point."""


def run_standin(command: list[str]) -> list[str]:
    kept = [
        a for a in command if a.startswith("--") and not a.startswith(("--recipe", "--topology"))
    ]
    return [sys.executable, "-I", "-S", str(STANDIN), *kept]


def profile(tmp_path, **gke) -> Profile:
    section = {
        "shape": "n2-standard-16",
        "hosts": 2,
        "image": "registry.example/olmo:1",
        "queue": "tpus",
        "grace_seconds": 300,
        "shared_paths": [str(tmp_path)],
        "max_restarts": 3,
    } | gke
    section["watching"] = {"refresh": 0.2, "api_patience": 5.0} | section.get("watching", {})
    return Profile.model_validate(
        {"name": "test", "backend": "gke", "topology": {}, "gke": section}
    )


class Lab:
    def __init__(
        self,
        tmp_path,
        *,
        quota=None,
        seed=0,
        translate=run_standin,
        grace_scale=0.01,
        secret_values=None,
        gate=False,
        flags=(),
        **gke,
    ):
        self.root = str(tmp_path / "run")
        self.store = Store()
        self.kubelet = Kubelet(self.store, translate, grace_scale, secret_values)
        self.cluster = Cluster(self.store, self.kubelet, quota, seed)
        self.api = ApiServer(self.store, self.kubelet.read_log)
        self.profile = profile(tmp_path, **gke)
        defaults = {"folder": "stage1_train", "steps": "20", "every": "5", "pause": "0.004"}
        self._gate = tmp_path / "gate"
        if gate:
            defaults["gate"] = str(self._gate)
        given = defaults | dict(f.lstrip("-").split("=", 1) for f in flags)
        flags = tuple(f"--{k}={v}" for k, v in given.items())
        self.job = Job("jobs.train", "stage1_train", "laptop", self.root, flags, distributed=True)
        self.said: list[str] = []
        self.kill = threading.Event()

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.api)
        self._stack.enter_context(self.cluster)
        return self

    def __exit__(self, *exc):
        return self._stack.__exit__(*exc)

    def launcher(self, profile=None, job=None, connect=None) -> Launcher:
        launcher = Launcher(
            job or self.job,
            profile or self.profile,
            connect or (lambda context: self.api.connect()),
            self.said.append,
            self._sleep,
        )
        send = launcher.kube._send

        def mortal(*args, **options):
            self.die_if_told()
            answer = send(*args, **options)
            self.die_if_told()
            return answer

        launcher.kube._send = mortal
        return launcher

    def open_gate(self):
        """Lets a job that was made with gate=True take its last step."""
        self._gate.touch()

    def die_if_told(self):
        if self.kill.is_set() and threading.current_thread().name.startswith("controller"):
            raise Killed

    def _sleep(self, seconds: float):
        self.die_if_told()
        time.sleep(min(seconds * SLEEP_SCALE, 0.3))

    def start(self, launcher: Launcher | None = None) -> "Controller":
        return Controller(launcher or self.launcher())

    def until(self, what, seconds: float = 120.0):
        """Waits for a condition; its value. Fails with the state of the cluster."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.cluster.errors:
                raise self.cluster.errors[0]
            if value := what():
                return value
            time.sleep(0.003)
        state = (self.cluster.jobset() or {}).get("status")
        raise AssertionError(f"never came true; JobSet status {state}; said: {self.said[-5:]}")

    def running(self, hosts: int = 2) -> list[dict]:
        return self.until(lambda: (p := self.cluster.running_pods()) and len(p) == hosts and p)

    def steps(self) -> list[int]:
        return sorted(
            int(p.name)
            for p in Path(self.job.run_root, self.job.folder, "checkpoints").glob("[0-9]*")
        )

    def leaders(self) -> list:
        """Processes of host 0 of slice 0, every start, in order."""
        return [p for name, p in self.kubelet.history if "-slice-0-0-" in name]


class Controller(threading.Thread):
    """Launcher.run in a thread; `result` or `error` afterwards."""

    def __init__(self, launcher: Launcher):
        super().__init__(daemon=True, name="controller")
        self.launcher = launcher
        self.result = None
        self.error: BaseException | None = None
        self.start()

    def run(self):
        try:
            self.result = self.launcher.run()
        except BaseException as e:
            self.error = e

    def finish(self, seconds: float = 120.0):
        """The stage's result, or the controller's exception raised here."""
        self.join(seconds)
        assert not self.is_alive(), "the controller is still at work"
        if self.error:
            raise self.error
        return self.result
