"""A host's maintenance notice is treated as SIGTERM is, only earlier.

On a cluster the notice ends in a drained node, hence in SIGTERM. Where a metadata server tells of it before (Google's
`instance/maintenance-event`), OLMO_MAINTENANCE_URL names the address to ask, and the job stops while there is time.
"""

import http.client
import logging
import os
import signal
import threading
import urllib.request

log = logging.getLogger("olmo")

ENVIRONMENT = "OLMO_MAINTENANCE_URL"
ASK_SECONDS = float(os.environ.get("OLMO_MAINTENANCE_SECONDS", "10"))
QUIET = ("", "NONE")


def watch(url: str | None = None, every: float = ASK_SECONDS) -> threading.Thread | None:
    """Asks the address that OLMO_MAINTENANCE_URL names, in a thread, until it tells of maintenance. None: no address."""
    url = url or os.environ.get(ENVIRONMENT)
    if not url:
        return None
    thread = threading.Thread(target=_ask, args=(url, every), daemon=True, name="maintenance")
    thread.start()
    return thread


def _ask(url: str, every: float) -> None:
    pause, told = threading.Event(), False
    while True:
        try:
            request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
            with urllib.request.urlopen(request, timeout=10) as answer:
                event = answer.read(200).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as e:
            if not told:  # once: a metadata server that is not there is no reason to stop
                log.warning("no maintenance notices from %s: %s", url, e)
            event, told = "", True
        if event not in QUIET:
            log.warning("maintenance notice %r: stopping as on SIGTERM", event)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        pause.wait(every)
