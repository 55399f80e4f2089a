"""The pin's server as a peer: it always ends, and its answers are measured like ours."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from dflash2_gguf.errors import NativeError
from dflash2_gguf.measure import Request
from dflash2_gguf.peer import PeerOptions, peer_server
from dflash2_gguf.sampling import SamplingParams

_SERVER = """#!{python}
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
open({log!r}, "w").write(json.dumps([os.getpid(), sys.argv[1:]]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        open({log!r} + ".body", "wb").write(body)
        timings = {{"predicted_n": 11, "predicted_ms": 500.0, "draft_n_accepted": 5}}
        body = {{"tokens": list(range(11)), "content": "hi", "timings": timings}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def _program(folder: Path, text: str) -> Path:
    path = folder / "llama-server"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _options(program: Path, **changes: int | None) -> PeerOptions:
    return PeerOptions(
        program=program,
        target=Path("t.gguf"),
        draft=Path("d.gguf"),
        n_threads=2,
        **changes,  # type: ignore[arg-type]
    )


def _fake(folder: Path) -> Path:
    log = str(folder / "log")
    return _program(folder, _SERVER.format(python=sys.executable, log=log))


def _started(folder: Path) -> tuple[int, list[str]]:
    pid, arguments = json.loads((folder / "log").read_text())
    return int(pid), arguments


def test_an_answer_is_measured_without_its_first_token(tmp_path: Path) -> None:
    with peer_server(_options(_fake(tmp_path))) as server:
        run = server.run([1, 2, 3], 11)
    assert run.tokens == tuple(range(11))
    assert run.tokens_per_second == pytest.approx(20.0)
    # 10 tokens after the first, 5 of them from the drafter: 5 rounds
    assert run.acceptance_length == pytest.approx(2.0)


def test_a_request_is_passed_on_with_its_sampling(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1, top_p=0.9, seed=7, grammar='root ::= "a"')
    request = Request(prompt=(1, 2), max_tokens=5, sampling=sampling)
    with peer_server(_options(_fake(tmp_path))) as server:
        server.answer(request)
        first = json.loads((tmp_path / "log.body").read_text())
        server.forget()
        server.answer(Request(prompt=(1, 2), max_tokens=5))
        second = json.loads((tmp_path / "log.body").read_text())
    assert first["prompt"] == [1, 2]
    assert (first["n_predict"], first["seed"], first["top_p"]) == (5, 7, 0.9)
    assert first["grammar"] == 'root ::= "a"'
    assert "seed" not in second
    assert second["temperature"] == 0
    assert [first["cache_prompt"], second["cache_prompt"]] == [True, False]


def test_the_server_is_ended_even_when_its_user_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), peer_server(_options(_fake(tmp_path))):
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(_started(tmp_path)[0], 0)


def test_it_drafts_only_when_asked_to(tmp_path: Path) -> None:
    with peer_server(_options(_fake(tmp_path))):
        assert "--spec-type" not in _started(tmp_path)[1]
    with peer_server(_options(_fake(tmp_path), draft_max=3)):
        arguments = " ".join(_started(tmp_path)[1])
    assert "-md d.gguf --spec-type draft-dflash --spec-draft-n-max 3" in arguments
    assert "--host 127.0.0.1" in arguments
    with peer_server(_options(_fake(tmp_path), draft_max=None)):
        arguments = " ".join(_started(tmp_path)[1])
    assert "--spec-type draft-dflash" in arguments
    assert "--spec-draft-n-max" not in arguments


def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    program = _program(tmp_path, "#!/bin/sh\necho no such model\nexit 3\n")
    with (
        pytest.raises(NativeError, match="ended with code 3: no such model"),
        peer_server(_options(program)),
    ):
        pass


def test_a_missing_program_names_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(NativeError) as caught, peer_server(_options(tmp_path / "none")):
        pass
    assert caught.value.hint == "run `make bench`"
