"""The table of targets: what upstream's tiny models publish, and that it is the right thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.builds import Build
from tests.oracle.target_table import TABLE, Target, collect, render

pytestmark = [pytest.mark.native, pytest.mark.peer]


@pytest.fixture(scope="module")
def targets(tiny_models: Path, pin: Build, ours: Build) -> list[Target]:
    return collect(sorted(tiny_models.glob("*.gguf")), pin, ours)


def test_nearly_every_architecture_publishes_its_inner_layers(targets: list[Target]) -> None:
    assert len(targets) == 128
    assert sum(target.pin_inner for target in targets) == 21
    assert sum(target.our_inner for target in targets) >= 125


def test_what_the_pin_publishes_is_published_here(targets: list[Target]) -> None:
    lost = [t.name for t in targets if t.pin_inner > t.our_inner or t.pin_last > t.our_last]
    assert lost == []


def test_values_equal_those_of_the_pin_bit_for_bit(targets: list[Target]) -> None:
    assert [target.name for target in targets if target.same_as_pin is False] == []
    assert sum(target.same_as_pin is True for target in targets) == 21


def test_published_inputs_are_the_outputs_of_the_layers_before(targets: list[Target]) -> None:
    captured = [target for target in targets if target.captured_error is not None]
    assert [target.name for target in captured if target.captured_error > 1e-6] == []
    # what cannot be compared that way is one of the 21 above
    unseen = [t.name for t in targets if t.our_inner and t.captured_error is None]
    assert [t.name for t in targets if t.name in unseen and not t.same_as_pin] == []
    assert {"glm5-next-moe", "glm-dsa-moe"} <= {target.name for target in captured}


def test_what_is_refused_is_refused_by_name(targets: list[Target]) -> None:
    for target in targets:
        if not target.our_inner:
            assert target.name.rsplit("-", 1)[0] in target.reason


def test_the_table_in_the_docs_is_current(targets: list[Target]) -> None:
    assert TABLE.read_text(encoding="utf-8") == render(targets)
