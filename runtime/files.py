"""Files written whole or not at all, under a name that the user chose.

    write_file("plan.json", text.encode())

A hidden sibling is written and then renamed, so that a kill or a full disk never leaves half a file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from vdnn.errors import ConfigError


def write_file(path: str | Path, content: bytes) -> None:
    """Put `content` at `path`, over what is there; ConfigError if that cannot be."""
    target = Path(path)
    part = target.with_name(f".{target.name}.part") if target.name else target
    try:
        if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
            target.write_bytes(content)
            return
        part.write_bytes(content)
        os.replace(part, target)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            part.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"file '{target}' cannot be written: {reason}; choose another place for it") from error
