"""A stand-in for the trainer: steps, checkpoints, stops and exits as it does, in milliseconds. Standard library only.

Its state is a chain of hashes, so that a lost, repeated or foreign step cannot go unnoticed.
"""

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def main():
    flags = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])
    folder = Path(flags["run-root"], flags["folder"])
    steps, every, pause = int(flags["steps"]), int(flags["every"]), float(flags["pause"])
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    if (os.environ["SLICE_INDEX"], os.environ["JOB_COMPLETION_INDEX"]) != ("0", "0"):
        follow(folder, stop)
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock.json", "a")  # noqa: SIM115  # held to the end
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another trainer is at work here", flush=True)
        sys.exit(43)
    step, state = newest(folder)
    print(f"begins at {step}", flush=True)
    while step < steps:
        if stop:
            save(folder, step, state)
            sys.exit(42)
        if flags.get("fail-at") == str(step):
            sys.exit(int(flags["code"]))
        if step == steps - 1 and "gate" in flags and not Path(flags["gate"]).exists():
            time.sleep(0.005)  # the last step waits for the test
            continue
        time.sleep(pause)
        step, state = step + 1, after(state, step)
        print(f"step {step}", flush=True)
        if step % every == 0:
            save(folder, step, state)
    save(folder, step, state)
    if flags.get("no-result"):
        sys.exit(0)
    result = {
        "stage": flags["folder"],
        "status": "ok",
        "inputs": {},
        "outputs": {"state": state},
        "figures": {"steps": step},
    }
    write(folder / "result.json", json.dumps(result))


def follow(folder, stop):
    while not (folder / "result.json").exists():
        if stop:
            sys.exit(42)
        time.sleep(0.005)
    sys.exit(0)


def after(state, step):
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()


def newest(folder):
    steps = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    if not steps:
        return 0, "start"
    return max(steps), (folder / "checkpoints" / str(max(steps)) / "state").read_text()


def save(folder, step, state):
    target = folder / "checkpoints" / str(step)
    if step == 0 or target.exists():
        return
    partial = folder / "checkpoints" / f".{step}.{os.getpid()}"
    partial.mkdir(parents=True)
    (partial / "state").write_text(state)
    (partial / "meta").mkdir()
    (partial / "meta" / "files").write_text("{}")
    partial.rename(target)


def write(path, text):
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


main()
