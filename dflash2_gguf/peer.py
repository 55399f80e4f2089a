"""A llama-server of the unpatched pin, to compare with. HTTP on 127.0.0.1 and nowhere else."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dflash2_gguf.errors import NativeError
from dflash2_gguf.measure import Request, Run

__all__ = ["PeerOptions", "PeerServer", "peer_server"]

_START_SECONDS = 600.0
_ANSWER_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """What to start: ``draft_max`` 0 decodes plainly, else with the pin's own DFlash 2 drafting.

    ``draft_max`` None drafts as many tokens as the pin does by itself.

    ``n_slots`` requests are answered at once and share ``n_ctx``.
    """

    program: Path
    target: Path
    draft: Path | None = None
    draft_max: int | None = 0
    n_ctx: int = 4096
    n_threads: int = 1
    n_slots: int = 1


@dataclass
class PeerServer:
    """A server that answers."""

    port: int
    _forgets: bool = False

    def run(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Greedy answer to ``prompt`` from empty caches."""
        request = Request(prompt=tuple(prompt), max_tokens=max_tokens)
        return self._measured(_body(request, cache_prompt=False))

    def forget(self) -> None:
        """Read prompts from their first token from now on."""
        self._forgets = True

    def answer(self, request: Request) -> Run:
        """Answer ``request``; what the caches hold of its prompt is not read again, see ``forget``.

        Of its sampling, temperature, top_k, top_p, min_p, seed and grammar are passed on.
        """
        return self._measured(_body(request, cache_prompt=not self._forgets))

    def _measured(self, body: dict[str, Any]) -> Run:
        answer = self._post(body)
        timings = answer["timings"]
        rounds = timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0)
        return Run(
            tokens=tuple(answer["tokens"]),
            text=answer["content"],
            seconds=timings["predicted_ms"] / 1000,
            acceptance_length=(timings["predicted_n"] - 1) / rounds if rounds else 0.0,
        )

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
        except (OSError, ValueError) as error:
            raise NativeError(f"llama-server gave no answer: {error}") from error
        return answer


@contextmanager
def peer_server(options: PeerOptions) -> Iterator[PeerServer]:
    """Start a server, wait until it is ready, and end it on the way out.

    Raises NativeError when the program is missing or does not get ready.
    """
    if not options.program.is_file():
        raise NativeError(f"{options.program} does not exist", "run `make bench`")
    with tempfile.TemporaryFile("w+") as log:
        port = _free_port()
        process = subprocess.Popen(_command(options, port), stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, port, log)
            yield PeerServer(port)
        finally:
            _end(process)


def _body(request: Request, *, cache_prompt: bool) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(request.prompt),
        "n_predict": request.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "cache_prompt": cache_prompt,
        "return_tokens": True,
    }
    optional = {"seed": sampling.seed, "grammar": sampling.grammar}
    return body | {name: value for name, value in optional.items() if value is not None}


def _command(options: PeerOptions, port: int) -> list[str]:
    words = [str(options.program), "-m", str(options.target), "-c", str(options.n_ctx)]
    words += ["-t", str(options.n_threads), "-tb", str(options.n_threads)]
    words += ["-np", str(options.n_slots)]
    words += ["--cache-ram", "0"]  # copies of idle prompts would fill the memory
    words += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    if options.draft is not None and options.draft_max != 0:
        words += ["-md", str(options.draft), "--spec-type", "draft-dflash"]
        if options.draft_max is not None:
            words += ["--spec-draft-n-max", str(options.draft_max)]
        words += ["-td", str(options.n_threads), "-tbd", str(options.n_threads)]
    return words


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: IO[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NativeError(f"llama-server ended with code {process.returncode}: {_tail(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise NativeError(f"llama-server was not ready after {_START_SECONDS:.0f} s: {_tail(log)}")


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return " / ".join(log.read().splitlines()[-3:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
