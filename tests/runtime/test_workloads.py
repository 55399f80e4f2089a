"""Files of questions: what they hold, and what is said of lines that are none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dflash2_gguf import Session
from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.measure import first_difference
from dflash2_gguf.workloads import Question, by_workload, read_questions
from tests.workloads import questions


def _file(folder: Path, *lines: str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_question_is_a_line(tmp_path: Path) -> None:
    lines = ['{"workload": "code", "text": "a", "name": "other keys are left alone"}', ""]
    lines += ['{"workload": "json", "text": "b", "json_schema": {"type": "object"}}']
    assert read_questions(_file(tmp_path, *lines)) == [
        Question(workload="code", text="a"),
        Question(workload="json", text="b", json_schema={"type": "object"}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no question"),
        ("[]", "line 2 is no question: a list, not an object"),
        ('{"text": "a"}', "line 2 is no question"),
        ('{"workload": "code", "text": " "}', "line 2: text is ' '"),
        ('{"workload": 3, "text": "a"}', "line 2: workload is 3"),
        ('{"workload": "json", "text": "a", "json_schema": 1}', "line 2: json_schema is 1"),
        ("[" * 100_000, "line 2 is no question"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = _file(tmp_path, '{"workload": "code", "text": "a"}', line)
    with pytest.raises(CheckpointError) as caught:
        read_questions(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_a_file_without_questions_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no question"):
        read_questions(_file(tmp_path, ""))
    with pytest.raises(CheckpointError, match="cannot read questions"):
        read_questions(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot read questions"):
        read_questions(tmp_path / "bytes")


def test_workloads_keep_their_order_and_the_first_questions() -> None:
    lines = [Question(workload=name, text=str(i)) for i in range(3) for name in ("b", "a")]
    groups = by_workload(lines, 2)
    assert list(groups) == ["b", "a"]
    assert [question.text for question in groups["a"]] == ["0", "1"]


def test_a_workload_with_too_few_questions_is_named() -> None:
    lines = [Question(workload="a", text="x")] * 2 + [Question(workload="b", text="x")]
    with pytest.raises(UsageError, match="workload 'b' has 1 question, 2 are needed"):
        by_workload(lines, 2)


def test_the_bundled_questions_fill_six_workloads(tmp_path: Path) -> None:
    found = read_questions(_file(tmp_path, *map(json.dumps, questions())))
    counts = Counter(question.workload for question in found)
    assert set(counts) == {"code", "math", "chat", "copy and edit", "JSON", "long context"}
    assert set(counts.values()) == {12}
    assert len({question.text for question in found}) == len(found)
    assert all(
        (question.json_schema is not None) == (question.workload == "JSON") for question in found
    )


@pytest.mark.native
def test_the_long_context_is_longer_than_4096_tokens_and_one_beginning(target_gguf: Path) -> None:
    texts = [one["text"] for one in questions() if one["workload"] == "long context"]
    with Session(target_gguf, n_ctx=256, n_threads=1) as session:
        first, second = (session.tokenize(text) for text in texts[:2])
    assert 4096 < len(first) < 5500
    at = first_difference(first, second)
    assert at is not None
    assert at > 4096
