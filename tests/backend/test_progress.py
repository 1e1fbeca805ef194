"""What a person sees while a model is fetched."""

from __future__ import annotations

import io

from rich.console import Console

from stemma.backend.local.model.progress import Progress, show_progress


def shown(*reports: Progress, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    with show_progress(console) as report:
        for progress in reports:
            report(progress)
        # What stands on the screen now, before the line is taken away.
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def test_bytes_are_shown_in_megabytes() -> None:
    screen = shown(Progress("Downloading", 0, 92_871_040), terminal=True)
    assert "Downloading" in screen
    assert "0.0 / 92.9 MB" in screen


def test_a_step_without_numbers_shows_seconds_and_no_bytes_of_the_step_before() -> None:
    last = Progress("Converting")
    screen = shown(Progress("Downloading", 5_000_000, 10_000_000), last, terminal=True)
    assert "MB" not in screen[screen.rindex("Converting") :]
    assert "0 s" in screen[screen.rindex("Converting") :]


def test_off_the_terminal_each_step_is_one_line() -> None:
    reports = [Progress("Downloading", n, 10) for n in range(10)] + [Progress("Converting")]
    assert shown(*reports, terminal=False) == "Downloading ...\nConverting ...\n"
