"""Manifests: read in order, filled in, and refused with all faults at once."""

import http.server
import threading

import pytest

from olmo_core_jax.data.mix import load_mix, parse_mix
from olmo_core_jax.errors import UserError


def test_lines_keep_their_order_and_get_the_tokenizer():
    text = "# header\n\nweb,z/{TOKENIZER}/1.npy\n  code , a/2.npy \n"
    sources = parse_mix(text, "m.txt", "org/tok")
    assert [(s.label, s.path) for s in sources] == [("web", "z/org/tok/1.npy"), ("code", "a/2.npy")]
    assert sources[0].uri("gs://bucket/base/") == "gs://bucket/base/z/org/tok/1.npy"


def test_every_fault_is_told_at_once():
    with pytest.raises(UserError) as e:
        parse_mix("web,a.npy\nnonsense\nweb,b.npy,c\ncode,a.npy\n,x.npy\n", "m.txt", "t")
    said = str(e.value)
    assert "4 problem(s)" in said and "line 2" in said and "line 3" in said and "line 5" in said
    assert "a.npy is listed 2 times" in said


def test_a_mix_of_no_files_is_refused():
    with pytest.raises(UserError, match="names no files"):
        parse_mix("# nothing\n", "m.txt", "t")


def test_unknown_mix_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="neither a file nor a mix"):
        load_mix(str(tmp_path / "none.txt"), "t")


def test_a_mix_is_read_over_http(tmp_path):
    (tmp_path / "m.txt").write_text("web,a/{TOKENIZER}.npy\n")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            assert load_mix(f"{url}/m.txt", "t")[0].path == "a/t.npy"
            with pytest.raises(UserError, match="404"):
                load_mix(f"{url}/other.txt", "t")
        finally:
            server.shutdown()
            thread.join()
