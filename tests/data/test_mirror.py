"""Mirrors: verified copies that go on where they stopped, and lists for the transfer service."""

import http.server
import re
import threading
from pathlib import Path

import pytest
from mixes import TOKENIZER, VOCAB

from olmo_core_jax.data import mirror as module
from olmo_core_jax.data.build import build_index
from olmo_core_jax.data.mirror import mirror, summary, transfer_list
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage import readers


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A web server with range requests; `broken` paths get that many torn answers first."""

    root = ""
    broken: dict[str, int] = {}
    asked: list[tuple[str, str, str]] = []

    def do_HEAD(self):
        self._serve(body=False)

    def do_GET(self):
        self._serve(body=True)

    def _serve(self, body: bool):
        self.asked.append((self.command, self.path, self.headers.get("Range", "")))
        path = Path(self.root + self.path)
        if not path.is_file():
            return self.send_error(404)
        data, status = path.read_bytes(), 200
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match:
            data, status = data[int(match[1]) : int(match[2]) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and self.broken.get(self.path, 0) > 0:
            self.broken[self.path] -= 1
            data = data[: len(data) // 2]
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def web(make_mix):
    """(mix, address, handler) of a mix behind a web server."""
    mix = make_mix()
    handler = type("H", (Ranges,), {"root": str(mix.base), "broken": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield mix, f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.npy")}


def test_an_index_over_http_takes_sizes_by_head(web):
    mix, address, handler = web
    index = build_index(mix.data(base=address), TOKENIZER, VOCAB)
    assert index.fingerprint == build_index(mix.data(), TOKENIZER, VOCAB).fingerprint
    heads = [path for command, path, _ in handler.asked if command == "HEAD"]
    assert len(heads) == len(set(heads)) == 5
    assert all(r for command, _, r in handler.asked if command == "GET")


def test_missing_files_are_named_before_anything_is_copied(web, tmp_path):
    mix, address, _ = web
    for path in list(mix.files)[:2]:
        Path(path).unlink()
    with pytest.raises(UserError, match="2 problem"):
        mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_copies_are_whole_and_recorded(web, tmp_path, monkeypatch):
    mix, address, handler = web
    monkeypatch.setattr(module, "PIECE", 512)
    handler.broken["/tiny/web/part-01.npy"] = 2
    said = []
    copied = mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"), said.append)
    assert contents(tmp_path / "copy") == contents(mix.base)
    assert summary(copied) == "5 files, 7008 bytes, all verified" and len(said) == 5
    handler.asked.clear()
    assert mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy")) == copied
    assert {command for command, *_ in handler.asked} == {"HEAD"}


def test_a_stopped_copy_goes_on(web, tmp_path, monkeypatch):
    mix, address, handler = web
    monkeypatch.setenv("OLMO_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PIECE", 512)
    monkeypatch.setattr(module, "COPIES", 1)
    monkeypatch.setattr(readers, "DEADLINE_SECONDS", 0.1)
    path, piece = "/tiny/code/part-02.npy", "bytes=2048-2559"

    original = readers.HttpReader.read

    def read(self, uri, offset, length):
        if uri.endswith(path) and offset == 2048:
            raise readers.ReadFailed("the line is cut")
        return original(self, uri, offset, length)

    with monkeypatch.context() as cut:
        cut.setattr(readers.HttpReader, "read", read)
        with pytest.raises(readers.ReadFailed):
            mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"))
    assert not (tmp_path / "copy" / path[1:]).exists()
    handler.asked.clear()
    mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"))
    assert contents(tmp_path / "copy") == contents(mix.base)
    ranges = [r for command, p, r in handler.asked if p == path and command == "GET"]
    assert ranges[0] == piece


def test_other_content_is_not_overwritten(web, tmp_path):
    mix, address, _ = web
    other = tmp_path / "copy" / "tiny" / "code" / "part-00.npy"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match=f"{other} exists with other content"):
        mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"))
    assert other.read_bytes() == b"x" * 1000


def test_a_damaged_copy_is_found_and_told(web, tmp_path):
    mix, address, _ = web
    mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"))
    damaged = tmp_path / "copy" / "tiny" / "code" / "part-00.npy"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    with pytest.raises(UserError, match="exists with other content"):
        mirror(str(mix.manifest), "tiny", address, str(tmp_path / "copy"))


def test_the_transfer_list(make_mix, tmp_path, monkeypatch):
    mix = make_mix()
    output = tmp_path / "list.tsv"
    with pytest.raises(UserError, match="https:// addresses only"):
        transfer_list(str(mix.manifest), "tiny", str(mix.base), str(output))
    sizes = {str(Path(p).relative_to(mix.base)): Path(p).stat().st_size for p in mix.files}
    monkeypatch.setattr(module.shards, "sizes", lambda base, paths: [sizes.get(p) for p in paths])
    total = transfer_list(str(mix.manifest), "tiny", "https://example.org/data", str(output))
    header, *lines = output.read_text().splitlines()
    assert header == "TsvHttpData-1.0" and lines == sorted(lines) and len(lines) == 5
    assert total == sum(int(line.split("\t")[1]) for line in lines) == sum(sizes.values())
    assert lines[0].startswith("https://example.org/data/tiny/code/part-00.npy\t1000")
