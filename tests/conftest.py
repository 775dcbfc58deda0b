"""One compilation cache for all tests and for the processes that they start: each program is compiled once."""

import os
import shutil
import tempfile

pytest_plugins = ["mixes"]  # fixtures of small mixes, tests/support/mixes.py

SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def pytest_configure(config):
    """Before anything imports JAX, which reads these names then. A cache of one session: nothing stale."""
    folder = tempfile.mkdtemp(prefix="jax_cache_")
    os.environ.update(SETTINGS, JAX_COMPILATION_CACHE_DIR=folder)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
