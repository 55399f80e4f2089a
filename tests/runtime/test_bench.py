"""The speed comparison: order, ratios, differences, the page, and a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dflash2_gguf import bench, bench_table
from dflash2_gguf.bench import Results
from dflash2_gguf.concurrency import Level, measure_level, rate_ratios
from dflash2_gguf.contenders import PIN, PLAIN, Contender, interleaved
from dflash2_gguf.errors import CheckpointError, OutputError, UsageError
from dflash2_gguf.measure import Request, Run
from dflash2_gguf.never_slower import IN_STEP, Cell, best_of, measure_cells, ratios
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Generation
from dflash2_gguf.stats import Stats

NAMES = ("plain", "auto", "control", "1", "7", "pin plain", "pin default", "pin 7")


class Fake:
    """A system that answers every request with the same tokens at a speed of its own."""

    def __init__(self, log: list[str], name: str, seconds: float, tokens: Sequence[int]) -> None:
        self._log, self._name = log, name
        self._seconds, self._tokens = seconds, tuple(tokens)
        self.n_forgotten = 0

    def answer(self, request: Request) -> Run:
        self._log.append(self._name)
        stats = Stats(verified_width=(5, 0, 0, 2), width_reasons={"drafts": 2, "plain": 5})
        return Run(self._tokens, "text", self._seconds, 2.0, stats=stats)

    def stream(self, request: Request) -> Iterator[Generation]:
        stats = self.answer(request).stats
        for number, token in enumerate(self._tokens):
            last = number == len(self._tokens) - 1
            yield Generation("", tokens=(token,), stats=stats if last else None)

    def forget(self) -> None:
        self.n_forgotten += 1


def _fakes(log: list[str], **different: Sequence[int]) -> dict[str, Contender]:
    seconds = {"plain": 2.0, "control": 2.0, "auto": 1.0, "1": 4.0, "7": 5.0}
    fakes = {
        name: Fake(log, name, seconds.get(name, 8.0), different.get(name, range(11)))
        for name in NAMES
    }
    return {name: Contender(fake.answer, fake.forget, fake.stream) for name, fake in fakes.items()}


def _requests(count: int, temperature: float = 0.0) -> list[Request]:
    sampling = SamplingParams(temperature=temperature)
    return [Request(prompt=(1,), max_tokens=11, sampling=sampling) for _ in range(count)]


def _ignore(text: str) -> None:
    """Progress that nobody reads."""


def _measured(temperature: float = 0.0, **different: Sequence[int]) -> Cell:
    requests = [{temperature: one} for one in _requests(3, temperature)]
    (cell,) = measure_cells("code", requests, _fakes([], **different), _ignore)
    return cell


def test_the_order_turns_round() -> None:
    assert interleaved("abcd", 0) == ["a", "b", "c", "d"]
    assert interleaved("abcd", 1) == ["d", "c", "b", "a"]
    assert interleaved("abcd", 2) == interleaved("abcd", 0)


def test_a_first_answer_warms_up_and_is_not_counted() -> None:
    log: list[str] = []
    (cell,) = measure_cells("code", [{0.0: one} for one in _requests(3)], _fakes(log), _ignore)
    assert log[: len(NAMES)] == list(NAMES)
    # of each prompt, all but the control alone, and three of them three times in step
    assert len(log) == len(NAMES) + 2 * (len(NAMES) - 1 + 9)
    assert cell.n_prompts == 2
    # 10 timed tokens a run
    assert [cell.tokens[name] for name in IN_STEP.values()] == [[30, 30]] * 3
    assert cell.tokens["plain"] == cell.tokens["7"] == [10, 10]
    assert "control" not in cell.tokens


def test_ratios_are_taken_prompt_by_prompt() -> None:
    cell = _measured()
    assert ratios(cell, "auto", "plain") == pytest.approx([2.0, 2.0])
    assert cell.overall("plain") == pytest.approx(5.0)
    assert best_of(cell, ["1", "7"]) == "1"


def test_an_answer_without_a_timed_token_has_no_ratio() -> None:
    cell = _measured(auto=[3])
    assert cell.speeds("auto") == [0.0, 0.0]
    assert ratios(cell, "auto", "plain") == []


def test_decisions_of_the_automatic_width_are_added_up() -> None:
    cell = _measured()
    assert cell.widths == [40, 0, 0, 16]  # eight answers
    assert cell.reasons == {"drafts": 16, "plain": 40}


def test_answers_that_leave_plain_decoding_are_counted() -> None:
    other = [1, 2, 3]
    assert _measured(**{"7": other, "pin default": other}).differences == {
        "plain": 0,
        "auto": 0,
        "1": 0,
        "7": 2,
        "pin plain": 0,
        "pin default": 2,
        "pin 7": 0,
        **dict.fromkeys(IN_STEP.values(), 0),
    }


def test_sampled_answers_of_the_pin_are_compared_with_its_own() -> None:
    other = [1, 2, 3]
    found = _measured(1.0, **{"pin plain": other, "pin default": other}).differences
    assert (found["pin plain"], found["pin default"], found["pin 7"]) == (0, 0, 2)


def test_an_incomplete_measurement_is_refused() -> None:
    fields = {"acceptance": {}, "differences": {}, "widths": [], "reasons": {}}
    for tokens, seconds in [({"plain": []}, {"plain": []}), ({"plain": [1]}, {"plain": []})]:
        with pytest.raises(UsageError, match="incomplete"):
            Cell(workload="a", temperature=0, tokens=tokens, seconds=seconds, **fields)
    with pytest.raises(UsageError, match="incomplete"):
        Level(
            n_parallel=1, n_requests=1, n_tokens=1, rates={"a": []}, differences={}, acceptance={}
        )


def _level(n_parallel: int = 2) -> Level:
    alone = {
        PLAIN: [Run(tuple(range(11)), "", 1.0, 1.0)] * 4,
        PIN: [Run((7,) * 11, "", 1.0, 1.0)] * 4,
    }
    log: list[str] = []
    return measure_level(n_parallel, _requests(4), alone, _fakes(log), _ignore)


def test_concurrent_answers_are_compared_with_those_given_alone() -> None:
    level = _level()
    assert level.n_tokens == 44
    assert level.differences["auto"] == 0
    assert level.differences["pin default"] == 4
    assert all(len(rates) == 2 for rates in level.rates.values())
    assert len(rate_ratios(level, "auto", "plain")) == 2


def test_caches_are_emptied_before_each_pass() -> None:
    fake = Fake([], "plain", 1.0, range(3))
    systems = {PLAIN: Contender(fake.answer, fake.forget)}
    measure_level(2, _requests(2), {PLAIN: [fake.answer(_requests(1)[0])] * 2}, systems, _ignore)
    assert fake.n_forgotten == 3


def test_each_question_is_asked_at_all_temperatures_before_the_next() -> None:
    asked: list[float] = []

    def answer(request: Request) -> Run:
        asked.append(request.sampling.temperature)
        return Run((1, 2), "", 1.0, 1.0)

    pairs = [{heat: _requests(1, heat)[0] for heat in (0.0, 1.0)} for _ in range(3)]

    def stream(request: Request) -> Iterator[Generation]:
        yield from (Generation("", tokens=(1,)), Generation("", tokens=(2,)))

    systems = {name: Contender(answer, lambda: None, stream) for name in ("plain", "auto")}
    cells = measure_cells("code", pairs, systems, _ignore)
    assert [cell.temperature for cell in cells] == [0, 1]
    assert [cell.n_prompts for cell in cells] == [2, 2]
    assert asked == [0.0] * 2 + [1.0] * 2 + 2 * ([0.0] * 2 + [1.0] * 2)


def test_the_page_holds_every_figure() -> None:
    cell = _measured()
    names = {"plain": 4.0, "auto": 2.0, "control": 5.0}
    times = {IN_STEP[name]: [seconds, seconds] for name, seconds in names.items()}
    cell = replace(cell, seconds={**cell.seconds, **times})
    text = bench_table.page("the command", "a machine", ["one"], [cell], [_level()])
    assert "    the command\n" in text
    assert "wrote this page on a machine." in text
    assert "- 2.00 times no drafter (code, T 0)" in text
    assert "- 4.00 times the best fixed width (code, T 0)" in text
    assert "- 8.00 times the pin at its best width (code, T 0)" in text
    row = next(line for line in text.splitlines() if line.startswith("| code, T 0 | 2, 60 |"))
    assert "| 2.00 (2.00 to 2.00) | 2.000 | 0.800 | 4.00 (4.00 to 4.00), 1 |" in row
    assert "| code, T 0 | 56 | 71 % | 0 % | 29 % | 0 % | 16 | 40 |" in text
    assert "| 2 | 4, 44 | pin, its default width |" in text


def test_every_row_of_a_table_has_the_columns_of_its_head() -> None:
    text = bench_table.page("c", "m", [], [_measured(), _measured(1.0)], [_level()])
    for table in text.split("\n\n"):
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_the_page_leaves_out_what_was_not_measured() -> None:
    text = bench_table.page("c", "m", [], [], [_level()])
    assert "Never slower" not in text
    assert "Many requests at once" in text


def test_results_of_the_same_settings_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    cell = _measured()
    Results(path, {"n": 1}).add(cell, _level())
    Results(path, {"n": 2}).add(_measured(1.0))
    assert Results(path, {"n": 1}).cells() == [cell]
    assert [level.n_parallel for level in Results(path, {"n": 1}).levels()] == [2]
    assert Results(path, {"n": 3}).cells() == []


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("{}\n")
    with pytest.raises(CheckpointError, match="line 1 is no result"):
        Results(path, {}).cells()
    with pytest.raises(OutputError, match="cannot write"):
        Results(tmp_path, {}).add(_measured())


def _arguments(folder: Path, questions: Path) -> list[str]:
    files = {"target": "t.gguf", "draft": "d.gguf", "server": "s", "results": "r.jsonl"}
    words = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    return [*words, "--workloads", str(questions)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "error: cannot read questions from"),
        (["--parts", "all"], "error: there is no part 'all'\nhint: it can be speed or concurrency"),
        (["-t", "0"], "error: threads is 0"),
        (["--limit", "0"], "error: limit is 0"),
        (["--widths", "3", "0"], "error: widths is 0"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    tmp_path: Path, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*_arguments(tmp_path, tmp_path / "none"), *extra]) > 0
    assert message in capsys.readouterr().err


def _write_questions(path: Path) -> Path:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    lines = [{"workload": "chat", "text": f"What is {i} plus {i}?"} for i in range(4)]
    lines += [
        {"workload": "JSON", "text": f"Write {i} as JSON", "json_schema": schema} for i in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.native
@pytest.mark.peer
@pytest.mark.slow
def test_the_real_pair_is_measured_and_answers_alike(
    target_gguf: Path,
    drafter: Path,
    peer_bin: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, file = tmp_path / "speed.md", tmp_path / "results.jsonl"
    arguments = ["--target", str(target_gguf), "--draft", str(drafter)]
    arguments += ["--server", str(peer_bin("llama-server")), "--results", str(file)]
    arguments += ["--workloads", str(_write_questions(tmp_path / "questions.jsonl"))]
    arguments += ["--limit", "1", "-n", "8", "-t", "1", "-c", "512"]
    arguments += ["--widths", "3", "--pin-widths", "7", "--parallel", "2"]
    assert bench.main([*arguments, "--write", str(page)]) == 0
    measured = [json.loads(line) for line in file.read_text().splitlines()]
    places = [(v["value"]["workload"], v["value"]["temperature"]) for v in measured[:4]]
    assert places == [("chat", 0), ("chat", 1), ("JSON", 0), ("JSON", 1)]
    assert all(line["value"]["differences"]["plain"] == 0 for line in measured[:4])
    assert measured[4]["value"]["differences"]["exact"] == 0
    assert all(line["value"]["acceptance"]["plain"] == 1 for line in measured)
    assert measured[0]["value"]["acceptance"]["3"] > 1
    # all is there: nothing is measured again, and the page is the same
    capsys.readouterr()
    assert bench.main(arguments) == 0
    assert capsys.readouterr().out == page.read_text()
    assert len(file.read_text().splitlines()) == len(measured)
