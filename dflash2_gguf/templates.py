"""A conversation as the text the target was trained on: its own chat template, in a sandbox.

Templates are programs from a downloaded file. llama-cpp-python's ``Jinja2ChatFormatter`` renders
them in jinja2's ImmutableSandboxedEnvironment with the options and functions of Transformers
(trim_blocks, lstrip_blocks, tojson, raise_exception, strftime_now).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_gguf.errors import CheckpointError, UsageError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, str]

_NO_TEMPLATE_HINT = (
    "give one with --chat-template FILE, or use `dflash2-run generate` with the exact prompt"
)


class ChatTemplate:
    """A compiled chat template of a model with these special tokens.

    Raises CheckpointError when there is none or it is no valid template.
    """

    def __init__(self, source: str | None, *, bos: str, eos: str) -> None:
        if not source:
            raise CheckpointError("the target has no chat template", _NO_TEMPLATE_HINT)
        import jinja2
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        try:
            self._formatter = Jinja2ChatFormatter(source, eos_token=eos, bos_token=bos)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template is not valid: {error}", _NO_TEMPLATE_HINT
            ) from error

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Prompt for the next answer to ``messages`` (role and content each).

        ``options`` are variables of the template, such as ``enable_thinking``. Raises UsageError
        when the template refuses the conversation, CheckpointError when it fails otherwise.
        """
        _require_messages(messages)
        import jinja2

        conversation: list[Any] = [dict(message) for message in messages]
        try:
            prompt = self._formatter(messages=conversation, **options).prompt
        except ValueError as error:  # raise_exception() of the template
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"the chat template failed: {error}", _NO_TEMPLATE_HINT
            ) from error
        return str(prompt)


def _require_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise UsageError("there are no messages to answer")
    for message in messages:
        if not {"role", "content"} <= set(message):
            raise UsageError(f"a message has keys {sorted(message)}", "it needs role and content")
