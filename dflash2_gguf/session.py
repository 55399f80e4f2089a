"""The Python API: one target, one drafter, streamed answers."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash2_gguf.engine import Engine, EngineOptions, Importance, Step, echo_log
from dflash2_gguf.errors import CheckpointError, OutputError, UsageError
from dflash2_gguf.models import Progress
from dflash2_gguf.plan import Plan, make_plan
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.scheduler import Scheduler, Ticket
from dflash2_gguf.stats import Memory, Stats
from dflash2_gguf.streaming import TextStream
from dflash2_gguf.templates import ChatTemplate, Message
from dflash2_gguf.transcripts import Transcripts

__all__ = ["Generation", "Session"]


@dataclass(frozen=True)
class Generation:
    """A piece of an answer, as one step produced it.

    text: what can be shown now; it may lag behind the tokens (unfinished characters, stop strings).
    tokens, from_draft: ids, and for each whether the drafter had proposed it.
    finish_reason: None until the last piece, then "stop" (end of text, stop string), "length"
        (max_tokens), "context" (the context is full) or "cancelled".
    stats: of this generation alone; on the last piece only.
    """

    text: str
    tokens: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()
    finish_reason: str | None = None
    stats: Stats | None = None


class Session:
    """A loaded target with an optional drafter; a context manager.

    The caches are kept between generations: what a prompt has in common with an earlier one is not
    evaluated again. Methods may be called from any thread; up to ``n_parallel`` generations run at
    a time, in one batch, and others wait for their turn.

    Raises CheckpointError, PairError or NativeError when the models cannot be loaded, UsageError
    for an option out of range.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        draft: str | os.PathLike[str] | None = None,
        *,
        n_ctx: int | None = None,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        draft_max: int | None = None,
        n_gpu_layers: int | None = None,
        n_parallel: int = 1,
        exact: bool = False,
        calibrate: bool = False,
        fit: bool = False,
        chat_template: str | None = None,
        on_progress: Progress | None = None,
        verbose: bool = False,
    ) -> None:
        """Load the models.

        The numbers are explained at ``EngineOptions``. With ``fit``, those of n_ctx and
        n_gpu_layers that are None are chosen so that everything fits into what is free (see
        ``plan``). ``chat_template`` replaces the target's own;
        ``on_progress`` is called with 0..1 while its weights are read. ``verbose`` prints
        llama.cpp's log to stderr, for this and all later sessions of the process.
        """
        options = EngineOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            n_parallel=n_parallel,
            exact=exact,
            calibrate=calibrate,
        )
        if verbose:
            echo_log()
        draft_path = None if draft is None else Path(draft)
        if fit:
            chosen = make_plan(Path(target), draft_path, options, fit=True)
            options = replace(options, n_ctx=chosen.n_ctx, n_gpu_layers=chosen.n_gpu_layers)
        self._engine: Engine | None = Engine(
            Path(target), draft_path, options, on_progress=on_progress
        )
        self._scheduler = Scheduler(self._engine)
        self._chat_template = chat_template
        self._template: ChatTemplate | None = None
        self._control = threading.Lock()  # guards the tokenizer's model and the transcripts
        self._transcripts = Transcripts(n_parallel)

    @staticmethod
    def plan(
        target: str | os.PathLike[str],
        draft: str | os.PathLike[str] | None = None,
        *,
        n_ctx: int | None = None,
        n_parallel: int = 1,
        n_batch: int = 512,
        n_ubatch: int = 512,
        draft_max: int | None = None,
        n_gpu_layers: int | None = None,
        fit: bool = False,
    ) -> Plan:
        """Memory of a session with these options, per part, before anything of it is allocated.

        Headers are read, weights are not, so it works for models larger than the memory. ``fit``
        as for a session. Raises what opening the session raises.
        """
        options = EngineOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            n_parallel=n_parallel,
        )
        draft_path = None if draft is None else Path(draft)
        return make_plan(Path(target), draft_path, options, fit=fit)

    @property
    def n_ctx(self) -> int:
        """Size of the context, in tokens."""
        return self._open_engine().n_ctx

    @property
    def n_ctx_trained(self) -> int:
        """The longest text that the target was trained to see, in tokens."""
        return self._open_engine().n_ctx_trained

    @property
    def draft_max(self) -> int:
        """Tokens drafted per round; 0 without a drafter."""
        return self._open_engine().draft_max

    @property
    def stats(self) -> Stats:
        """Counters since the session was opened; waits for the step in progress."""
        with self._scheduler.engine(urgent=True):
            return self._open_engine().stats()

    @property
    def memory(self) -> Memory:
        """Bytes in use, per part; waits for the step in progress."""
        with self._scheduler.engine(urgent=True):
            return self._open_engine().memory()

    @property
    def n_vocab(self) -> int:
        """Tokens of the target's vocabulary."""
        with self._control:
            return self._open_engine().vocab.n_tokens

    def importance(self) -> list[Importance]:
        """What the drafter's weights were multiplied with, of a session with ``calibrate``.

        Raises UsageError for other sessions, NativeError where the drafter computed NaN.
        """
        with self._scheduler.engine(urgent=True):
            return self._open_engine().importance()

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``, after the target's BOS if it uses one; special tokens are read."""
        with self._control:
            vocab = self._open_engine().vocab
            return vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of ``tokens``; control tokens are left out unless ``special``."""
        with self._control:
            return self._open_engine().vocab.detokenize(tokens, special=special)

    def chat_tokens(
        self, messages: Sequence[Message], *, template_options: dict[str, Any] | None = None
    ) -> list[int]:
        """The prompt that ``chat`` would evaluate for ``messages``, as token ids."""
        text = self._chat_prompt(messages, template_options or {})
        return self._tokenize_rendered(text, True)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        draft: bool | int = True,
    ) -> Generator[Generation, None, None]:
        """Continue ``prompt`` (a text or token ids), yielding what each step produced.

        ``max_tokens`` None goes on until the text or the context ends. ``draft`` False decodes
        plainly, a number bounds the tokens drafted per round; the text does not depend on it.
        Closing the iterator ends the generation. Raises UsageError for a prompt that is empty or
        does not fit, NativeError when a step fails.
        """
        engine = self._open_engine()
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        engine.vocab.require_ids(tokens)
        _require_prompt(tokens, engine.n_ctx)
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}", "it can be 1 or more")
        limit = _draft_limit(draft)

        def begin(seq: int) -> None:
            engine.begin(
                seq,
                tokens,
                sampling or SamplingParams(),
                max_tokens=max_tokens,
                draft_max=limit,
            )

        stream = TextStream((stop,) if isinstance(stop, str) else stop)
        return self._run(lambda: self._scheduler.open(tokens, begin), stream)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        draft: bool | int = True,
        template_options: dict[str, Any] | None = None,
    ) -> Generator[Generation, None, None]:
        """Answer ``messages`` ({"role", "content"} each) through the target's chat template.

        ``template_options`` are variables of the template. Raises CheckpointError when there is no
        usable template, else as ``generate``.
        """
        text = self._chat_prompt(messages, template_options or {})
        with self._control:
            tokens = self._transcripts.encode(text, self._tokenize_rendered)
        pieces = self.generate(
            tokens, max_tokens=max_tokens, sampling=sampling, stop=stop, draft=draft
        )
        return self._remember(text, tokens, pieces)

    def cancel(self) -> None:
        """End the generations in progress, from any thread; they yield "cancelled"."""
        self._scheduler.cancel()

    def reset(self) -> None:
        """Forget the caches, so that the next prompt is evaluated from its first token."""
        self._scheduler.forget()
        with self._control:
            self._transcripts.clear()

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Logits of ``tokens`` where the last step chose the last token of its generation.

        Raises UsageError for ids outside the vocabulary, or when that step chose none.
        """
        with self._scheduler.engine(urgent=True):
            engine = self._open_engine()
            engine.vocab.require_ids(tokens)
            return engine.logits(self._scheduler.latest, tokens)

    def save(self) -> bytes:
        """The sequence worked on last, as bytes: tokens, both caches, samplers and its place.

        Between two pieces of a generation it is one that ``resume`` can go on with.
        """
        with self._scheduler.engine(urgent=True):
            return self._open_engine().save(self._scheduler.latest)

    def save_file(self, path: str | os.PathLike[str]) -> None:
        """Write what ``save`` gives to a file, whole or not at all; OutputError if it cannot be."""
        _write_whole(Path(path), self.save())

    def restore(self, state: bytes | str | os.PathLike[str]) -> list[int]:
        """Load a saved sequence (bytes, or a file's path); its tokens.

        Prompts that begin with these tokens go on from there. A session without the drafter of the
        one that saved, or with another, restores it too. Raises StateError for a state that is
        damaged, or of another target, build or ``n_parallel``, CheckpointError for a file that
        cannot be read.
        """
        data = state if isinstance(state, bytes) else _read_file(Path(state))
        seq = self._scheduler.restore(data)
        with self._scheduler.engine(urgent=True):
            engine = self._open_engine()
            tokens = engine.tokens(seq)
            text = engine.vocab.text(tokens)
        with self._control:
            self._transcripts.add(text, tokens)
        return tokens

    def resume(self, *, stop: Sequence[str] = ()) -> Generator[Generation, None, None]:
        """Go on with the generation that ``restore`` loaded, as if it had not been interrupted.

        Limits and samplers are those it began with. Raises UsageError when there is none.
        """
        return self._run(self._adopt, TextStream((stop,) if isinstance(stop, str) else stop))

    def close(self) -> None:
        """Cancel what runs and free the models; again is harmless."""
        self._scheduler.cancel()
        with self._control:
            self._scheduler.shut()
            self._engine = None

    def __enter__(self) -> Session:  # typing.Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise UsageError("the session is closed")
        return self._engine

    def _adopt(self) -> Ticket:
        with self._scheduler.engine(urgent=True):
            seq = self._scheduler.latest
            if not self._open_engine().is_active(seq):
                raise UsageError(
                    "there is no unfinished generation",
                    "restore one that was saved before its iterator ended or was closed",
                )
        return self._scheduler.adopt(seq)

    def _run(
        self, start: Callable[[], Ticket], stream: TextStream
    ) -> Generator[Generation, None, None]:
        engine = self._open_engine()
        ticket = start()
        try:
            piece = Generation("")
            while piece.finish_reason is None:
                step = self._scheduler.next(ticket)
                piece = (
                    Generation("", finish_reason="cancelled")
                    if step is None
                    else _piece_of(step, stream, engine)
                )
                if piece.finish_reason is not None:
                    stats = self._stats_of(ticket)
                    piece = replace(piece, text=piece.text + stream.finish(), stats=stats)
                if piece.tokens or piece.finish_reason is not None:
                    yield piece
        finally:
            self._scheduler.close(ticket)

    def _stats_of(self, ticket: Ticket) -> Stats | None:
        with self._scheduler.engine(urgent=True) as engine:
            return None if engine is None else engine.seq_stats(ticket.seq)

    def _chat_prompt(self, messages: Sequence[Message], options: dict[str, Any]) -> str:
        if self._template is None:
            vocab = self._open_engine().vocab
            self._template = ChatTemplate(
                self._chat_template or vocab.chat_template(),
                bos=vocab.token_text(vocab.bos),
                eos=vocab.token_text(vocab.eos),
            )
        return self._template.render(messages, **options)

    def _tokenize_rendered(self, text: str, first: bool) -> list[int]:
        """A template writes its special tokens itself; some leave BOS to the tokenizer."""
        vocab = self._open_engine().vocab
        tokens = vocab.tokenize(text, add_special=False)
        if first and vocab.adds_bos and tokens[:1] != [vocab.bos]:
            tokens.insert(0, vocab.bos)
        return tokens

    def _remember(
        self, text: str, tokens: list[int], pieces: Generator[Generation, None, None]
    ) -> Generator[Generation, None, None]:
        answered: list[int] = []
        try:
            with closing(pieces):
                for piece in pieces:
                    answered.extend(piece.tokens)
                    yield piece
        finally:
            with self._control:
                if self._engine is not None:
                    said = self._engine.vocab.text(answered)
                    self._transcripts.add(text + said, (*tokens, *answered))


def _require_prompt(tokens: Sequence[int], n_ctx: int) -> None:
    if not tokens:
        raise UsageError("the prompt is empty")
    if len(tokens) >= n_ctx:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens, the context {n_ctx}",
            "use a larger context (--ctx-size) or a shorter prompt",
        )


def _draft_limit(draft: bool | int) -> int | None:
    if draft is True:
        return None
    if draft < 0:
        raise UsageError(f"draft is {draft}", "it can be True, False or a number of tokens")
    return int(draft)


def _piece_of(step: Step, stream: TextStream, engine: Engine) -> Generation:
    """The step's tokens up to the one that completes a stop string, and their text."""
    ends = step.finish == "stop"  # the last token ends the answer and is no part of its text
    text, used = "", 0
    for token in step.tokens:
        used += 1
        if not (ends and used == len(step.tokens)):
            text += stream.feed(engine.vocab.piece(token))
        if stream.stopped:
            break
    return Generation(
        text=text,
        tokens=step.tokens[:used],
        from_draft=tuple(index < step.n_accepted for index in range(used)),
        finish_reason="stop" if stream.stopped else step.finish,
    )


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _write_whole(path: Path, data: bytes) -> None:
    """A temporary file next to ``path``, renamed when it is complete."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from error
