"""Standard output as it is found: an encoding that lacks characters, a reader that has gone, a disk that is full.

def main(argv=None) -> int:
    return run_program("vdnn", lambda: run(parse(argv)))        # 141 where nobody reads any more
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper

CLOSED = 141
"""What a command returns whose reader has gone, as shells say it of one that SIGPIPE ends: 128 + 13."""
PLAIN = {"→": "->", "×": "x", "±": "+-", "µ": "u", "μ": "u", "·": "*", "…": "...", "–": "-", "≤": "<=", "≥": ">="}
"""What stands in ASCII for the characters that commands write; "?" for all others."""
HANDLER = "vdnn.plain"


def run_program(name: str, body: Callable[[], int]) -> int:
    """The exit code of `body`, which writes to standard output; CLOSED, and no word, where its reader has gone."""
    write_plain_words()
    code = 0
    try:
        try:
            code = body()
        finally:  # here, for at the end of the process nobody could catch what the system refuses
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        code = CLOSED
    except SystemExit as ended:  # rich ends so when its pipe breaks; --help and wrong arguments do too
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = CLOSED
    except OSError as error:
        if not code:
            print(f"{name}: the system refused standard output: {error.strerror or error}", file=sys.stderr)
        code = code or 1
    else:
        return code
    discard_output()
    return code


def write_plain_words() -> None:
    """Let characters that the encoding of a standard stream lacks be written in ASCII."""
    codecs.register_error(HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def discard_output() -> None:
    """Send what is still to be written, and cannot be, to nowhere."""
    with suppress(OSError, ValueError, AttributeError):  # of streams that are no files, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """ASCII for the first character that cannot be encoded, and where to go on; see codecs.register_error."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    after = error.start + 1
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is no text: as surrogateescape has it
        return bytes([ord(character) - 0xDC00]), after
    return PLAIN.get(character, "?"), after
