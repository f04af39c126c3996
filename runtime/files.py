"""Files written whole or not at all, under a name that the user chose.

    write_file("plan.json", text.encode())
    write_output("runs/plan.json", text.encode())       # makes runs/ too

A hidden sibling is written and then renamed, so that a kill or a full disk never leaves half a file.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from vdnn.errors import ConfigError, VdnnError

PLACE_FAULTS = frozenset(
    (
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    )
)
"""What the system says of a place that no file can be made in; all else (a full disk) is no fault of the name."""


def is_place_fault(error: OSError) -> bool:
    """Whether another path would help: exit code 2 rather than 1."""
    return error.errno in PLACE_FAULTS


def user_cache() -> Path:
    """Where is kept what is measured once: vdnn in $XDG_CACHE_HOME or ~/.cache; of a user without a home in the folder
    for temporary files."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vdnn"
    except RuntimeError:
        return Path(gettempdir()) / f"vdnn-{os.getuid()}"


def user_path(text: str) -> Path:
    """A path as people write it, ~ included; ConfigError if nobody of that name has a home or it cannot be a path."""
    if "\0" in text:
        raise ConfigError(f"{text!r} is no path: it has a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"path '{text}': there is no such user; write ./{text} for a folder of that name") from error


def write_file(path: str | Path, content: bytes) -> None:
    """Put `content` at `path`, over what is there.

    Raises ConfigError for a place where no file can be, VdnnError for what the system refuses (a full disk).
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part") if target.name else target
    try:
        if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
            target.write_bytes(content)
            return
        try:
            part.write_bytes(content)
            os.replace(part, target)
        except BaseException:  # a signal too
            with suppress(OSError, ValueError):
                part.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise _refused(target, error) from error


def write_output(path: str | Path, content: bytes) -> None:
    """`write_file` for a result whose place the user chose: folders above it that are not there are made."""
    target = Path(path)
    try:
        with suppress(FileExistsError):  # a file where a folder should be: `write_file` says so
            target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _refused(target, error) from error
    write_file(target, content)


def check_output(path: str | Path) -> None:
    """Try whether `write_output` can write at `path`, with its errors; nothing is left there or changed."""
    target = Path(path)
    made: list[Path] = []
    try:
        if target.exists() and not target.is_file():  # opening a pipe would wait for its reader
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        for folder in reversed(target.absolute().parents):
            if not folder.is_dir():
                with suppress(FileExistsError):  # what is there but is no folder is met below
                    folder.mkdir()
                    made.append(folder)
        part = target.with_name(f".{target.name}.part")
        with suppress(FileExistsError), part.open("xb"):
            part.unlink()
    except (OSError, ValueError) as error:
        raise _refused(target, error) from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


def _refused(target: Path, error: OSError | ValueError) -> VdnnError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    message = f"file '{target}' cannot be written: {reason}"
    if isinstance(error, OSError) and not is_place_fault(error):
        return VdnnError(message)
    return ConfigError(f"{message}; choose another place for it")
