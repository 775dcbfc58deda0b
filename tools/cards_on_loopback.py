"""Metaflow's own card viewer, on loopback only (as shipped it listens on every interface)."""

import os
import runpy
import sys
import threading
import webbrowser
from pathlib import Path

from metaflow.plugins.cards import card_server

FLOW = Path(__file__).resolve().parents[1] / "flows" / "reproduce.py"
PORT = os.environ.get("PORT", "8324")


class LoopbackServer(card_server.ThreadingHTTPServer):
    def __init__(self, address, handler):
        try:
            super().__init__(("127.0.0.1", address[1]), handler)
        except OSError as e:
            sys.exit(f"port {PORT}: {e.strerror}; another one: PORT=8325 make ui")


def main() -> None:
    card_server.ThreadingHTTPServer = LoopbackServer
    address = f"http://127.0.0.1:{PORT}"
    print(f"cards of the latest run: {address}", file=sys.stderr)
    # Where there is no browser, nothing happens.
    opener = threading.Timer(3.0, webbrowser.open, [address])
    opener.daemon = True
    opener.start()
    sys.argv = [str(FLOW), "card", "server", "--port", PORT]
    runpy.run_path(str(FLOW), run_name="__main__")


if __name__ == "__main__":
    main()
