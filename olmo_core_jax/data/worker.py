"""How a data worker process behaves: it outlives no trainer, and leaves stop signals to it."""

import os
import signal
import threading
import time

LOOK_EVERY_SECONDS = 1.0


def begin(index: int, count: int) -> None:
    """Called in each worker process before it reads anything.

    A signal to the whole process group is the trainer's to act on: it still needs batches until it
    has saved, and ends its workers itself. A trainer that was killed cannot, so they watch for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watcher = threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True)
    watcher.start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_SECONDS)
    os._exit(1)
