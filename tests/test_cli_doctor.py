"""`stemma doctor`: what is there and what is missing."""

from __future__ import annotations

import io
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stemma.commands import doctor
from stemma.commands.doctor import Report, check_libraries, folder_size, numbers, parse_requirement
from tests.cli_for_tests import run_stemma


def examine(model: object, *, load: bool = False) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=300, color_system=None)
    well = doctor.examine(None if model is None else str(model), load=load, console=console)
    assert isinstance(console.file, io.StringIO)
    return well, console.file.getvalue()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEMMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STEMMA_MODEL", raising=False)
    return tmp_path / "cache"


@pytest.mark.parametrize("load", [False, True])
def test_everything_about_a_model_is_told(load: bool, tiny_model: Any) -> None:
    well, text = examine(tiny_model(), load=load)
    assert well
    for name in ("stemma", "python", "torch", "transformers", "tokenizers", "memory", "cache"):
        assert re.search(rf"^{name}\s+\S", text, re.MULTILINE)
    assert version("torch") in text
    assert re.search(r"^device +(cpu|cuda)", text, re.MULTILINE)
    assert re.search(r"^dtype +(float32|bfloat16)", text, re.MULTILINE)
    assert re.search(rf"^model +.*{tiny_model().name}", text, re.MULTILINE)
    assert re.search(r"^context +1,024 tokens", text, re.MULTILINE)
    assert re.search(r"^KV pool +(about )?[\d,]+ tokens, [\d,]+ MiB", text, re.MULTILINE)
    kinds = r"(C\+\+|torch, flash|torch, matmul)"
    assert re.search(rf"^attention +{kinds} kernel", text, re.MULTILINE)
    assert re.search(r"^chat +\S", text, re.MULTILINE)
    assert (re.search(r"^loaded +in .* tokens/s", text, re.MULTILINE) is not None) == load
    assert text.endswith("Nothing is missing.\n")


def test_kernels_that_are_switched_off_are_told_so(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEMMA_COMPILE", "off")
    _, text = examine(tiny_model())
    assert re.search(r"^kernels +of torch, .*STEMMA_COMPILE=off *$", text, re.MULTILINE)
    assert re.search(r"^attention +torch", text, re.MULTILINE)


def test_what_the_model_would_get_is_what_it_gets(tiny_model: Any) -> None:
    pools = []
    for load in (False, True):
        _, text = examine(tiny_model(), load=load)
        found = re.search(r"KV pool +(?:about )?([\d,]+) tokens, ([\d,]+) MiB", text)
        assert found is not None
        pools.append([int(number.replace(",", "")) for number in found.groups()])
    (guessed, guessed_mib), (real, real_mib) = pools
    assert 0.5 * real < guessed < 2 * real
    assert 0.5 * real_mib <= guessed_mib <= 2 * real_mib


def test_where_the_chat_differs_from_the_template_is_told(tiny_model: Any, tmp_path: Path) -> None:
    for file in tiny_model().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    well, text = examine(tmp_path)
    assert well
    assert re.search(r"^chat +.*(trim|strip|white)", text, re.MULTILINE)


def test_the_default_model_is_missing_until_it_is_fetched(empty_cache: Path) -> None:
    well, text = examine(None)
    assert not well
    assert "missing: the default model" in text
    assert "stemma doctor --load" in text
    assert str(empty_cache) in text
    assert not empty_cache.exists()  # it only looks


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("/not/there", "there is no model at /not/there"),
        ("someone/certainly-not-here", "someone/certainly-not-here is fetched when it is first"),
    ],
)
def test_a_model_that_is_not_here_is_missing(source: str, told: str, empty_cache: Path) -> None:
    well, text = examine(source)
    assert not well
    assert f"missing: {told}" in text


def test_a_broken_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    well, text = examine(tmp_path)
    assert not well
    assert "config.json cannot be read" in text


def test_a_missing_or_old_library_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = [
        "regex>=2024.11",
        "torch>=99.1",
        "surely-not-there>=1.0",
        'pytest>=99; extra == "dev"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda name: needed)
    report = Report()
    check_libraries(report)
    assert len(report.problems) == 2
    assert "torch" in report.problems[0]
    assert 'pip install "torch>=99.1"' in report.problems[0]
    assert (
        'surely-not-there is not installed: pip install "surely-not-there>=1.0"'
        in (report.problems[1])
    )
    well, text = examine(None)
    assert not well
    assert "missing: torch" in text


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("torch>=2.11", ("torch", "2.11")),
        ("huggingface_hub>=1.0", ("huggingface_hub", "1.0")),
        ("llguidance~=1.9", ("llguidance", "1.9")),
        ("rich (>=13.9,<20)", ("rich", "13.9")),
        ("numpy", ("numpy", "")),
        ("a.b-c[extra]>=1", ("a.b-c", "1")),
    ],
)
def test_a_requirement_is_a_name_and_a_least_version(text: str, parsed: tuple[str, str]) -> None:
    assert parse_requirement(text) == parsed


def test_versions_compare_as_numbers() -> None:
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("5.0.0rc1") == (5, 0, 0)
    assert numbers("2.9") < numbers("2.11")
    assert numbers("") == ()


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b").write_bytes(b"x" * 5)
    assert folder_size(tmp_path) == 15


def test_the_exit_status_says_whether_something_is_missing(
    tiny_model: Any, empty_cache: Path
) -> None:
    assert run_stemma("doctor", "--model", str(tiny_model())).returncode == 0
    missing = run_stemma("doctor", "--model", "/not/there")
    assert (missing.returncode, missing.stderr) == (1, "")


@pytest.mark.slow
def test_the_default_model_is_well(default_model_folder: Path) -> None:
    done = run_stemma("doctor", "--load")
    assert done.returncode == 0, done.stdout
    assert "8,192 tokens" in done.stdout
