"""Chat templates come from downloaded files: rendered as Transformers would, in a sandbox."""

from __future__ import annotations

import re

import pytest

from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.native import api
from dflash2_gguf.templates import ChatTemplate

pytestmark = pytest.mark.native  # llama-cpp-python's formatter comes with its library

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _library() -> None:
    api()


def _render(source: str, **options: object) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(HELLO, **options)


def test_messages_and_special_tokens_are_available() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert _render(source + "{{ eos_token }}") == "<s>user: hello</s>"


def test_the_prompt_ends_where_the_answer_begins() -> None:
    assert _render("{% if add_generation_prompt %}assistant:{% endif %}") == "assistant:"


def test_blocks_leave_no_white_space() -> None:
    assert _render("a\n  {% if true %}\n  b\n  {% endif %}\nc") == "a\n  b\nc"


def test_the_functions_of_transformers_are_there() -> None:
    assert re.fullmatch(r"\d{4}", _render("{{ strftime_now('%Y') }}"))
    assert _render("{{ ['ü', {'a': 1}] | tojson }}") == '["ü", {"a": 1}]'
    assert (
        _render("{% for i in range(9) %}{% if i == 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
    )


def test_options_are_variables() -> None:
    assert _render("{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ messages.append(1) }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_the_sandbox_refuses_what_a_template_has_no_business_with(source: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template failed"):
        _render(source)


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="has no chat template") as caught:
        ChatTemplate(None, bos="", eos="")
    assert caught.value.hint is not None
    assert "--chat-template" in caught.value.hint


def test_a_template_that_is_none_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="is not valid"):
        ChatTemplate("{% if %}", bos="", eos="")


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "x"}]])
def test_messages_need_role_and_content(messages: list[dict[str, str]]) -> None:
    with pytest.raises(UsageError):
        ChatTemplate("x", bos="", eos="").render(messages)
