"""Pods as local processes: environment as Kubernetes would make it, logs with time stamps, SIGTERM then SIGKILL."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from .store import Status, Store, set_condition

# What of this process's environment pods get: enough to run, nothing that names accelerators or credentials.
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT",
        "GOOGLE_APPLICATION_CREDENTIALS", "TENSORSTORE_GCS_HTTP_URL", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING", "JAX_COMPILATION_CACHE_DIR")  # fmt: skip


class Process:
    """The main container of one pod."""

    def __init__(self, argv: list[str], env: dict[str, str]):
        self.started = time.monotonic()
        self.ended: float | None = None
        self.log = b""
        self._killer: threading.Timer | None = None
        self._child = subprocess.Popen(
            argv,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._child.stdout:
            stamp = datetime.now(UTC).isoformat(timespec="microseconds")[:26]
            self.log += f"{stamp}000Z ".encode() + line
        self._child.wait()
        self.ended = time.monotonic()

    def poll(self) -> int | None:
        """The exit code as a shell gives it (128 + signal), None while it runs."""
        code = self._child.poll()
        if code is None:
            return None
        self._reader.join(2)
        if self._killer:
            self._killer.cancel()
        return 128 - code if code < 0 else code

    def terminate(self, grace: float):
        if self._killer is None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            self._killer = threading.Timer(grace, self._child.kill)
            self._killer.daemon = True
            self._killer.start()

    def kill(self):
        self._child.kill()


class Kubelet:
    """Starts and ends the processes of pods. translate: the container's command as it runs on this machine."""

    def __init__(
        self,
        store: Store,
        translate: Callable[[list[str]], list[str]],
        grace_scale: float = 1.0,
        secrets=None,
    ):
        self.store, self.translate, self.grace_scale = store, translate, grace_scale
        self.secrets = secrets or {}
        self.processes: dict[str, Process] = {}  # by pod uid
        self.history: list[tuple[str, Process]] = []  # (pod name, process) of every start, in order
        self.environments: list[dict[str, str]] = []  # of every start
        self.addresses: dict[str, str] = {}

    def start(self, pod: dict) -> None:
        container = pod["spec"]["containers"][0]
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        env |= self._env(pod, container)
        self.environments.append(env)
        argv = self.translate([expand(part, env) for part in container["command"]])
        argv = [self._resolve(part) for part in argv]
        process = Process(argv, env)
        self.processes[pod["metadata"]["uid"]] = process
        self.history.append((pod["metadata"]["name"], process))

    def _env(self, pod: dict, container: dict) -> dict[str, str]:
        env = {
            "JOB_COMPLETION_INDEX": pod["metadata"]["annotations"][
                "batch.kubernetes.io/job-completion-index"
            ]
        }
        for entry in container.get("env", []):
            if "value" in entry:
                env[entry["name"]] = expand(entry["value"], env)
                continue
            source = entry["valueFrom"]
            if "fieldRef" in source:
                kind, label = re.fullmatch(
                    r"metadata\.(labels|annotations)\['(.+)'\]", source["fieldRef"]["fieldPath"]
                ).groups()
                env[entry["name"]] = pod["metadata"][kind][label]
            else:
                env[entry["name"]] = self.secrets[source["secretKeyRef"]["name"]][
                    source["secretKeyRef"]["key"]
                ]
        env["OLMO_GRACE_SECONDS"] = str(
            max(0.5, float(env.get("OLMO_GRACE_SECONDS", 20)) * self.grace_scale)
        )
        return env

    def _resolve(self, text: str) -> str:
        """Cluster DNS: `host.jobset:port` of the coordinator becomes a loopback address."""
        for name, address in self.addresses.items():
            text = re.sub(re.escape(name) + r":\d+", address, text)
        return text

    def read_log(self, pod_name: str, container: str) -> tuple[bytes, bool]:
        """(log so far, has the container ended). Raises Status as the API does."""
        with self.store.changed:
            pod = next(
                (o for k, o in self.store.objects.items() if k[1] == "pods" and k[3] == pod_name),
                None,
            )
        if pod is None:
            raise Status(404, "NotFound", f'pods "{pod_name}" not found')
        process = self.processes.get(pod["metadata"]["uid"])
        if process is None:
            raise Status(
                400,
                "BadRequest",
                f'container "{container}" in pod "{pod_name}" is waiting to start: ContainerCreating',
            )
        ended = process.poll() is not None
        return process.log, ended

    def report(self, pod: dict, code: int) -> None:
        """Writes a container's end into its pod's status."""

        def change(body):
            body["status"]["phase"] = "Failed" if code else "Succeeded"
            state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
            body["status"]["containerStatuses"] = [
                {"name": body["spec"]["containers"][0]["name"], "state": state}
            ]
            set_condition(body, "Ready", "False", "PodFailed" if code else "PodCompleted")

        self.store.update(
            ("", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]), change
        )


def expand(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), text)


def module_runner(command: list[str]) -> list[str]:
    """The real job: `python` of the image is the python of this process."""
    return [sys.executable, *command[1:]]
