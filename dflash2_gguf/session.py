"""The Python API: one target, one drafter, streamed answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash2_gguf.engine import AbortedError, Engine, EngineOptions, Step, echo_log
from dflash2_gguf.errors import UsageError
from dflash2_gguf.models import Progress
from dflash2_gguf.plan import Plan, make_plan
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.stats import Memory, Stats
from dflash2_gguf.streaming import TextStream
from dflash2_gguf.templates import ChatTemplate, Message

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

    The caches are kept between generations: what a prompt has in common with the one before is not
    evaluated again. Methods may be called from any thread; one generation runs at a time, others
    wait.

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
        self._chat_template = chat_template
        self._template: ChatTemplate | None = None
        self._transcript = _Transcript()
        self._turn = threading.Lock()  # held by the generation that is open
        self._call = threading.Lock()  # held during one native call
        self._control = threading.Lock()  # guards the fields below; taken after _call, if both
        self._owner: int | None = None
        self._active = False
        self._cancelled = False

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
        )
        draft_path = None if draft is None else Path(draft)
        return make_plan(Path(target), draft_path, options, n_parallel=n_parallel, fit=fit)

    @property
    def n_ctx(self) -> int:
        """Size of the context, in tokens."""
        return self._open_engine().n_ctx

    @property
    def draft_max(self) -> int:
        """Tokens drafted per round; 0 without a drafter."""
        return self._open_engine().draft_max

    @property
    def stats(self) -> Stats:
        """Counters since the session was opened; waits for the step in progress."""
        with self._call:
            return self._open_engine().stats()

    @property
    def memory(self) -> Memory:
        """Bytes in use, per part; waits for the step in progress."""
        with self._call:
            return self._open_engine().memory()

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
        return self._tokenize_rendered(text, first=True)

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
        request = _Request(
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stream=TextStream((stop,) if isinstance(stop, str) else stop),
            draft_max=_draft_limit(draft),
        )
        return self._run(request)

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
        tokens = self._transcript.encode(text, self._tokenize_rendered)
        pieces = self.generate(
            tokens, max_tokens=max_tokens, sampling=sampling, stop=stop, draft=draft
        )
        return self._remember(text, tokens, pieces)

    def cancel(self) -> None:
        """End the generation in progress, from any thread; it yields finish_reason "cancelled"."""
        with self._control:
            if self._active and self._engine is not None:
                self._cancelled = True
                self._engine.abort()

    def reset(self) -> None:
        """Forget the caches, so that the next prompt is evaluated from its first token."""
        with self._hold_turn(), self._call:
            self._transcript = _Transcript()
            self._open_engine().clear()

    def close(self) -> None:
        """Cancel what runs and free the models; again is harmless."""
        self.cancel()
        with self._call, self._control:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

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

    @contextmanager
    def _hold_turn(self) -> Iterator[None]:
        if self._owner == threading.get_ident():
            raise UsageError(
                "a generation of this thread is still open", "exhaust its iterator or close() it"
            )
        with self._turn:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def _cancellable(self) -> Iterator[None]:
        with self._control:
            self._active, self._cancelled = True, False
        try:
            yield
        finally:
            with self._control:
                self._active = False

    def _run(self, request: _Request) -> Generator[Generation, None, None]:
        with self._hold_turn(), self._cancellable():
            with self._call:
                engine = self._open_engine()
                before = engine.stats()
                engine.begin(
                    request.tokens,
                    request.sampling,
                    max_tokens=request.max_tokens,
                    draft_max=request.draft_max,
                )
            try:
                yield from self._pieces(engine, request.stream, before)
            finally:
                with self._call:
                    if self._engine is engine:
                        engine.end()

    def _pieces(
        self, engine: Engine, stream: TextStream, before: Stats
    ) -> Generator[Generation, None, None]:
        piece = Generation("")
        while piece.finish_reason is None:
            piece = self._piece(engine, stream)
            if piece.finish_reason is not None:
                stats = self._since(engine, before)
                piece = replace(piece, text=piece.text + stream.finish(), stats=stats)
            if piece.tokens or piece.finish_reason is not None:
                yield piece

    def _piece(self, engine: Engine, stream: TextStream) -> Generation:
        """The next step as a piece; one that says "cancelled" after ``cancel`` or ``close``."""
        while not self._cancelled:
            with self._call:
                if self._engine is not engine:
                    break
                try:
                    return _piece_of(engine.step(), stream, engine)
                except AbortedError:
                    continue  # _cancelled is not set: it was meant for a generation before this one
        return Generation("", finish_reason="cancelled")

    def _since(self, engine: Engine, before: Stats) -> Stats | None:
        with self._call:
            return engine.stats().since(before) if self._engine is engine else None

    def _chat_prompt(self, messages: Sequence[Message], options: dict[str, Any]) -> str:
        if self._template is None:
            vocab = self._open_engine().vocab
            self._template = ChatTemplate(
                self._chat_template or vocab.chat_template(),
                bos=vocab.token_text(vocab.bos),
                eos=vocab.token_text(vocab.eos),
            )
        return self._template.render(messages, **options)

    def _tokenize_rendered(self, text: str, *, first: bool) -> list[int]:
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
                    self._transcript = _Transcript(text + said, (*tokens, *answered))


@dataclass(frozen=True)
class _Request:
    tokens: Sequence[int]
    max_tokens: int | None
    sampling: SamplingParams
    stream: TextStream
    draft_max: int | None


@dataclass(frozen=True)
class _Transcript:
    """A conversation's tokens as they really were, with the text they stand for.

    Tokenizing an answer again may split it differently, which would make the caches useless from
    there on. So tokens are kept as long as the next prompt begins with the same text.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()

    def encode(self, text: str, tokenize: Any) -> list[int]:
        if self.text and text.startswith(self.text):
            return [*self.tokens, *tokenize(text[len(self.text) :], first=False)]
        return list(tokenize(text, first=True))


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
