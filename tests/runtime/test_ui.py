"""What the terminal's helper prints where no terminal is."""

from __future__ import annotations

import pytest

from dflash2_gguf import ui


def test_progress_is_a_line_a_minute_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(ui.time, "monotonic", lambda: now)
    with ui.Terminal().progress("answering") as on_progress:
        for second, fraction in ((5, 0.1), (59, 0.2), (61, 0.3), (100, 0.5), (130, 0.755)):
            now = float(second)
            on_progress(fraction)
    assert capsys.readouterr().err == "answering: 30%\nanswering: 76%\n"
