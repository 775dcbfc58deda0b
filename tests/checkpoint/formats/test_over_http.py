"""Weights from web servers: read by range, resumed, and refused with address and bytes."""

import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
import tiny_checkpoints as factory
from tiny_checkpoints import raw_bytes, tiny, to_ours, write_hf

from olmo_core_jax.checkpoint import download
from olmo_core_jax.checkpoint.formats import hf, olmo_core
from olmo_core_jax.checkpoint.store import CheckpointStore
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.tree import get
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.recipes.schema import Weights
from olmo_core_jax.storage import readers

LAPTOP = load_recipe("laptop")
CFG = tiny()


class Server(http.server.ThreadingHTTPServer):
    """Files of a folder with byte ranges, as a plain server and as the hub; faults by name.

    cut: name -> bytes after which the next answers' connections close. asked: (method, name, range).
    """

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.cut, self.asked = folder, {}, []
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body: bool):
        path = urlparse(self.path).path
        if path.startswith("/api/models/lab/model"):
            return self._api(path)
        name = path.removeprefix("/lab/model/resolve/c0ffee/").lstrip("/")
        file = self.server.folder / name
        span = self.headers.get("Range")
        self.server.asked.append((self.command, name, span))
        if not file.is_file():
            return self._send(404, b"", {})
        data, status, extra = file.read_bytes(), 200, {"ETag": f'"{sha256(file)}"'}
        extra["X-Repo-Commit"] = "c0ffee"
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            if int(first) >= len(data):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            total = len(data)
            data, status = data[int(first) : int(last) + 1 if last else None], 206
            extra["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{total}"
        self._send(status, data, extra, body, self._cut(name) if body else None)

    def _cut(self, name: str) -> int | None:
        cuts = self.server.cut.get(name)
        return cuts.pop(0) if cuts else None

    def _api(self, path: str):
        if path.endswith("/revision/missing"):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = [
            {
                "rfilename": p.name,
                "size": p.stat().st_size,
                "blobId": hashlib.sha1(
                    b"blob %d\0" % p.stat().st_size + p.read_bytes()
                ).hexdigest(),
            }
            | (
                {"lfs": {"sha256": sha256(p), "size": p.stat().st_size, "pointerSize": 1}}
                if p.suffix == ".safetensors"
                else {}
            )
            for p in sorted(self.server.folder.iterdir())
        ]
        info = {"id": "lab/model", "modelId": "lab/model", "sha": "c0ffee", "siblings": files}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _send(self, status, data, headers, body=True, cut=None):
        self.send_response(status)
        for key, value in {"Accept-Ranges": "bytes", **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *args):
        pass


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "DEADLINE_SECONDS", 2.0)
    folder = write_hf(CFG, tmp_path / "served", shards=2)
    server = Server(folder)
    yield server
    server.shutdown()
    server.server_close()


def test_converted_in_place_by_ranges(tmp_path, server):
    step = to_ours(CFG, server.address, tmp_path / "ours")
    assert CheckpointStore(str(tmp_path / "ours")).latest_good() == 0 and step
    ranged = [
        span
        for method, name, span in server.asked
        if name.endswith(".safetensors") and method == "GET"
    ]
    assert ranged and all(ranged)


def test_a_broken_connection_is_tried_again(tmp_path, server):
    server.cut["model-00001-of-00002.safetensors"] = [100]
    to_ours(CFG, server.address, tmp_path / "ours")
    assert CheckpointStore(str(tmp_path / "ours")).latest_good() == 0


def test_a_dead_link_is_named(tmp_path, server):
    (server.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"http://127.*there is no model-00002-of-00002.safetensors"
    ):
        to_ours(CFG, server.address, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_short_file_is_named_with_its_bytes(tmp_path, server):
    file = server.folder / "model-00002-of-00002.safetensors"
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-77])
    pattern = (
        rf"http://127.*model-00002.* has {whole - 77} bytes where its header describes {whole}"
    )
    with pytest.raises(UserError, match=pattern):
        to_ours(CFG, server.address, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_native_checkpoint_over_http(tmp_path, monkeypatch):
    """The reference's state read from a server: the same bits, by ranges; a lost file is named."""
    monkeypatch.setattr(readers, "DEADLINE_SECONDS", 2.0)
    source = LAPTOP.stage1.reference.native[400]
    shutil.copytree(source, tmp_path / "step400")
    server = Server(tmp_path)
    try:
        address = f"{server.address}/step400"
        local = olmo_core.open_native(source, LAPTOP.model)
        remote = olmo_core.open_native(address, LAPTOP.model)
        assert (remote.step, remote.adam_step) == (400, local.adam_step)
        for which in ("mu", "nu"):
            a, b = (x.moments(which, "float32") for x in (local, remote))
            for leaf in leaves(LAPTOP.model)[:6]:
                assert np.array_equal(np.asarray(get(a, leaf.path)), np.asarray(get(b, leaf.path)))
        (tmp_path / "step400" / "model_and_optim" / "__0_3.distcp").unlink()
        with pytest.raises(UserError, match=r"http://127.*__0_3.distcp is missing: \d+ bytes"):
            olmo_core.open_native(address, LAPTOP.model)
    finally:
        server.shutdown()
        server.server_close()


def from_hub(server, folder, revision="stage1-step100") -> str:
    pytest.importorskip("huggingface_hub")
    return download.from_hub("lab/model", revision, str(folder), endpoint=server.address)


def test_hub_at_a_revision(tmp_path, server):
    folder = from_hub(server, tmp_path / "got")
    assert raw_bytes(Path(folder)) == raw_bytes(server.folder)
    assert hf.open_hf(folder, CFG).rows == CFG.padded_vocab_size
    server.asked.clear()
    from_hub(server, tmp_path / "got")
    assert not server.asked  # everything is there, and its hashes fit


def test_hub_download_goes_on_where_it_broke_off(tmp_path, server, monkeypatch):
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    name = "model-00002-of-00002.safetensors"
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    server.cut[name] = [150_000] + 20 * [0]
    whole = (server.folder / name).stat().st_size
    with pytest.raises(
        download.DownloadFailed, match=rf"{name}: \d+ of {whole} bytes came"
    ) as error:
        from_hub(server, tmp_path / "got")
    came = int(str(error.value).split(f"{name}: ")[1].split()[0])
    assert 0 < came <= 150_000
    server.cut.clear()
    server.asked.clear()
    from_hub(server, tmp_path / "got")
    spans = [span for method, file, span in server.asked if file == name and method == "GET"]
    assert spans == [f"bytes={came}-"]
    assert raw_bytes(tmp_path / "got") == raw_bytes(server.folder)


def test_hub_wrong_hash(tmp_path, server):
    from_hub(server, tmp_path / "got")
    file = tmp_path / "got" / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"bytes came, but not the \d+ that the hub lists"):
        from_hub(server, tmp_path / "got")
    from_hub(server, tmp_path / "got")
    assert raw_bytes(tmp_path / "got") == raw_bytes(server.folder)


def test_hub_unknown_revision(tmp_path, server):
    with pytest.raises(UserError, match="no lab/model at revision missing"):
        from_hub(server, tmp_path / "got", "missing")


def test_local_weights_are_left_where_they_are(tmp_path):
    folder = write_hf(CFG, tmp_path / "hf")
    assert download.local_weights(Weights(hf=str(folder)), str(tmp_path)) == str(folder)
    with pytest.raises(UserError, match="there is nothing at"):
        download.local_weights(Weights(hf=str(tmp_path / "no")), str(tmp_path))


def test_identity_sees_other_bytes_of_the_same_size(tmp_path):
    one = write_hf(CFG, tmp_path / "a")
    two = write_hf(CFG, tmp_path / "b", factory.random_params(CFG, seed=1))
    a, b = (download.identity(Weights(hf=str(f))) for f in (one, two))
    assert a != b
    shutil.copytree(one, tmp_path / "c")
    assert download.identity(Weights(hf=str(tmp_path / "c"))) == a
