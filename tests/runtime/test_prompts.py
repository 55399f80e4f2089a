"""Files of prompts, and how a target reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.prompts import prompt_tokens, read_prompts


class _Session:
    """Reads a text as its length; has a chat template or not."""

    def __init__(self, template: bool = True) -> None:
        self._template = template

    def tokenize(self, text: str) -> list[int]:
        return [len(text)]

    def chat_tokens(self, messages: Any) -> list[int]:
        if not self._template:
            raise CheckpointError("the target has no chat template", "give one")
        return [1, *self.tokenize(messages[0]["content"]), 2]


def test_a_text_is_a_message_of_a_user_unless_it_is_raw() -> None:
    session: Any = _Session()
    assert prompt_tokens(session, "hello", raw=False) == [1, 5, 2]
    assert prompt_tokens(session, "hello", raw=True) == [5]
    assert prompt_tokens(session, (7, 8), raw=False) == [7, 8]


def test_a_target_without_template_takes_raw_texts() -> None:
    session: Any = _Session(template=False)
    with pytest.raises(CheckpointError) as caught:
        prompt_tokens(session, "hello", raw=False)
    assert caught.value.message == "the target has no chat template"
    assert caught.value.hint == "--raw takes texts as they are"


def test_prompts_are_lines_or_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text('{"text": "one"}\n{"tokens": [1, 2]}\n')
    assert read_prompts(text) == ("one", "two")
    assert read_prompts(lines) == ("one", (1, 2))


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"tokens": ["a"]}', '{"tokens": 3}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of .*p\.jsonl is no prompt"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n")
    with pytest.raises(CheckpointError, match="there are no prompts"):
        read_prompts(path)
