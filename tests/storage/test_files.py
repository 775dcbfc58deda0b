"""The small door: the same promises for folders and for a bucket (an emulator that the real Google client talks to)."""

import json
import os
import socket
import threading
import time
from http import HTTPStatus

import pytest

from olmo_core_jax import storage
from olmo_core_jax.errors import Locked, UserError
from olmo_core_jax.storage import files, lock


def conditional(server, objects):
    """The emulator with what it leaves out: uploads and deletions only of the generation that is named (0: none)."""
    whole = threading.Lock()

    def checked(handler):
        def on_condition(request, response, store, *args, **kwargs):
            with whole:
                wanted = request.query.get("ifGenerationMatch", [None])[0]
                try:
                    bucket = request.params["bucket_name"]
                    now = store.get_file_obj(bucket, _name_in(request))["generation"]
                except Exception:
                    now = "0"
                if wanted is not None and wanted != now:
                    response.status = HTTPStatus.PRECONDITION_FAILED
                    return None
                return handler(request, response, store, *args, **kwargs)

        return on_condition

    better = {handler: checked(handler) for handler in (objects.insert, objects.delete)}
    return [
        (pattern, {verb: better.get(h, h) for verb, h in methods.items()})
        for pattern, methods in server.HANDLERS
    ]


def _name_in(request):
    """Of an object in the path, of an upload in the query or in a multipart's first part."""
    named = request.params.get("object_id") or request.query.get("name", [None])[0]
    return named or request.data["meta"]["name"]


@pytest.fixture(params=["folder", "bucket"])
def root(request, tmp_path, monkeypatch):
    if request.param == "folder":
        yield str(tmp_path)
        return
    pytest.importorskip("google.cloud.storage")
    server = pytest.importorskip("gcp_storage_emulator.server")
    objects = pytest.importorskip("gcp_storage_emulator.handlers.objects")
    monkeypatch.setattr(server, "HANDLERS", conditional(server, objects))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    running = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="b")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    files._client.cache_clear()
    running.start()
    yield "gs://b/root"
    running.stop()
    files._client.cache_clear()


def test_what_is_written_is_read(root):
    uri = storage.join(root, "a/b.json")
    assert not storage.exists(uri)
    storage.write_json(uri, {"x": 1})
    assert storage.read_json(uri) == {"x": 1}
    storage.write_bytes(uri, b"0123456789")
    assert storage.read_bytes(uri, 3, 4) == b"3456"
    assert storage.size(uri) == 10
    storage.delete(uri)
    storage.delete(uri)
    for read in (storage.size, storage.read_bytes):
        with pytest.raises(FileNotFoundError):
            read(uri)


def test_listing(root):
    for name in ("x/1", "x/deep/2", "y"):
        storage.write_text(storage.join(root, name), name)
    found = [(e.name, e.size, e.is_dir) for e in storage.list_dir(root)]
    assert found == [("x", 0, True), ("y", 1, False)]
    assert sorted(storage.walk(storage.join(root, "x"))) == [("1", 3), ("deep/2", 8)]
    assert storage.list_dir(storage.join(root, "nowhere")) == []


def test_exactly_one_creates(root):
    uri, won = storage.join(root, "claim"), []

    def claim(i):
        if storage.create_exclusive(uri, f"{i}".encode()):
            won.append(i)

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    # The emulator checks its preconditions without a lock of its own.
    if not storage.is_remote(root):
        assert len(won) == 1
    assert storage.read_text(uri) in [str(i) for i in won]
    assert not storage.create_exclusive(uri, b"late")


def test_readers_of_a_folder_never_see_half_a_file(tmp_path):
    uri, sizes, stop = str(tmp_path / "f"), set(), threading.Event()
    storage.write_bytes(uri, b"a" * 10_000_000)

    def look():
        while not stop.is_set():
            sizes.add(storage.size(uri))

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(5):
        storage.write_bytes(uri, b"b" * 10_000_000)
    stop.set()
    reader.join()
    assert sizes == {10_000_000}
    assert os.listdir(tmp_path) == ["f"]


def test_what_is_no_json_is_named(root):
    uri = storage.join(root, "x.json")
    storage.write_text(uri, "{")
    with pytest.raises(UserError, match=r"x\.json is not valid JSON"):
        storage.read_json(uri)


@pytest.mark.parametrize("text", ["[]", "[1]", "1", "null", '"x"'])
def test_what_is_no_mapping_is_named(root, text):
    uri = storage.join(root, "x.json")
    storage.write_text(uri, text)
    with pytest.raises(UserError, match=r"x\.json holds no JSON object"):
        storage.read_mapping(uri)
    storage.write_text(uri, "{}")
    assert storage.read_mapping(uri) == {}


def test_a_folder_in_the_place_of_a_file_and_a_file_in_a_folders(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    folder, below = str(tmp_path / "folder"), str(tmp_path / "file" / "x.json")
    for read in (storage.read_bytes, storage.read_text, storage.read_json, storage.read_mapping):
        for uri in (folder, below):
            with pytest.raises(UserError, match=rf"{uri} cannot be read: .* directory; move away"):
                read(uri)
    with pytest.raises(UserError, match=r"x\.json cannot be read: Not a directory"):
        storage.size(below)
    with pytest.raises(UserError, match=r"folder cannot be written: Is a directory"):
        storage.append(folder, b"x")
    for make in (storage.make_folder_of, lambda uri: storage.append(uri, b"x")):
        with pytest.raises(UserError, match=r"x\.json cannot be written"):
            make(below)
    with pytest.raises(UserError, match=r"lock .*lock\.json cannot be opened: Is a directory"):
        (tmp_path / "lock.json").mkdir()
        with lock.hold(str(tmp_path)):
            pass


def test_an_append_without_room_is_told():
    if not os.path.exists("/dev/full"):
        pytest.skip("no device that is always full")
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left"):
        storage.append("/dev/full", b"x")


def test_a_bucket_without_a_name():
    with pytest.raises(UserError, match="names no bucket"):
        storage.exists("gs:///x")


def test_a_live_lock_is_respected_and_a_free_one_taken(root, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 1.0)
    with lock.hold(root):
        time.sleep(0.2)
        with pytest.raises(Locked, match=f"process {os.getpid()}"), lock.hold(root):
            pass
    with lock.hold(root):
        pass


def test_a_dead_lock_in_a_bucket_is_taken_over(root, monkeypatch):
    if not storage.is_remote(root):
        pytest.skip("on a disk the kernel frees the lock: tests/jobs/test_common.py")
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.5)
    left = json.dumps({"host": "gone", "pid": 1, "beat": "x"})
    storage.write_text(storage.join(root, "lock.json"), left)
    with lock.hold(root):
        assert json.loads(storage.read_text(storage.join(root, "lock.json")))["pid"] == os.getpid()


def test_a_bucket_that_is_away_for_a_while_does_not_cost_the_lock(root, monkeypatch):
    """Heartbeats that fail, one of them after it arrived, are made up for; nobody can take the lock over later."""
    if not storage.is_remote(root):
        pytest.skip("only a bucket's lock has heartbeats")
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 1.0)
    write, failures = storage.write_if, iter(["before", "after", "before"])

    def unlucky(uri, data, generation):
        when = next(failures, None) if generation else None
        if when == "before":
            raise ConnectionError("away")
        done = write(uri, data, generation)
        if when == "after":
            raise TimeoutError("the answer was lost")
        return done

    monkeypatch.setattr(storage, "write_if", unlucky)
    monkeypatch.setattr(lock.os, "_exit", lambda code: pytest.fail(f"left with {code}"))
    with lock.hold(root):
        time.sleep(0.6)
        with pytest.raises(Locked), lock.hold(root):
            pass
    assert next(failures, None) is None


def test_a_lock_that_somebody_took_over_is_left_to_them(root, monkeypatch):
    """No heartbeat for a minute, and the block ends before the next one that would find out."""
    if not storage.is_remote(root):
        pytest.skip("on a disk the kernel holds the lock as long as the process lives")
    uri, theirs = storage.join(root, "lock.json"), b'{"id": "theirs", "pid": 2, "host": "b"}'
    with lock.hold(root):
        storage.write_bytes(uri, theirs)
    assert storage.read_bytes(uri) == theirs

    read = storage.read_versioned

    def overtaken(where):
        found = read(where)
        storage.write_bytes(uri, theirs)
        return found

    storage.delete(uri)
    with lock.hold(root):
        monkeypatch.setattr(storage, "read_versioned", overtaken)
    assert storage.read_bytes(uri) == theirs


def test_the_end_of_a_block_frees_a_lock_whose_last_heartbeat_was_not_answered(root, monkeypatch):
    if not storage.is_remote(root):
        pytest.skip("only a bucket's lock has heartbeats")
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    write, sent = storage.write_if, threading.Event()

    def unanswered(uri, data, generation):
        done = write(uri, data, generation)
        if generation and not sent.is_set():
            monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 60)
            sent.set()
            raise TimeoutError("the answer was lost")
        return done

    monkeypatch.setattr(storage, "write_if", unanswered)
    with lock.hold(root):
        assert sent.wait(10)
    assert not storage.exists(storage.join(root, "lock.json"))


def test_only_the_generation_that_is_meant_is_deleted(root):
    if not storage.is_remote(root):
        pytest.skip("files have no generations")
    uri = storage.join(root, "a")
    old = storage.write_if(uri, b"old", 0)
    new = storage.write_if(uri, b"new", old)
    storage.delete(uri, old)
    assert storage.read_bytes(uri) == b"new"
    storage.delete(uri, new)
    storage.delete(uri, new)
    assert not storage.exists(uri)


def test_appends_add_up(root):
    uri = storage.join(root, "log.jsonl")
    if not storage.is_remote(uri):
        storage.local_path(root).mkdir(exist_ok=True)
    for i in range(40):  # more than one compose takes sources
        storage.append(uri, b"line %d\n" % i)
    assert storage.read_bytes(uri).splitlines() == [b"line %d" % i for i in range(40)]
    assert [e.name for e in storage.list_dir(root)] == ["log.jsonl"]


def test_an_append_whose_answer_was_lost_counts_once(root, monkeypatch):
    if not storage.is_remote(root):
        pytest.skip("a local append has no answer to lose")
    from google.api_core.exceptions import PreconditionFailed
    from google.cloud.storage import Blob

    compose = Blob.compose

    def answer_lost(blob, *args, **kwargs):
        compose(blob, *args, **kwargs)
        raise PreconditionFailed("the retry met its own first attempt")

    uri = storage.join(root, "log.jsonl")
    storage.append(uri, b"first\n")
    monkeypatch.setattr(Blob, "compose", answer_lost)
    storage.append(uri, b"second\n")
    assert storage.read_bytes(uri) == b"first\nsecond\n"

    def other_writer(blob, *args, **kwargs):
        raise PreconditionFailed("somebody wrote in between")

    monkeypatch.setattr(Blob, "compose", other_writer)
    with pytest.raises(UserError, match="has another writer"):
        storage.append(uri, b"third\n")
