"""How a program ends: what the user can do something about is one line on standard error and an exit code.

guarded("vdnn plan", lambda: plan(arguments))       # 2 for a bad configuration, 130 after Ctrl-C
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from vdnn.errors import VdnnError
from vdnn.runtime.signals import Stopped, stoppable


def guarded(program: str, body: Callable[[], int | None]) -> int:
    """Run `body`; what `finally` undoes in it is undone.

    Returns the exit code: an error's; 128 + the number of a signal (SIGINT 130, SIGTERM 143); 1 if the system refuses
    memory, a file or a disk; else what `body` returns, None for 0. That nobody reads the output is left to
    vdnn.runtime.streams.
    """
    try:
        with stoppable():
            return body() or 0
    except (VdnnError, Stopped) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that is full, memory that the system does not give
        where = f" '{error.filename}'" if error.filename else ""
        print(f"{program}: the system refused{where}: {error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"{program}: the system has no more memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
