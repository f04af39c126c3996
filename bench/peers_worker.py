"""The process of one case of vdnn.bench.peers: measures, and writes what it found as JSON.

    python -m vdnn.bench.peers_worker CASE OUT           # CASE as JSON; OUT is written whole or not at all
    python -m vdnn.bench.peers_worker CASE               # compiles what the case needs, for the cache on disk

What a case cannot do (too little memory, an error) is a result with its reason: {"failed": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from vdnn.bench.command import end_with_parent, reason
from vdnn.bench.peers_cases import Case
from vdnn.errors import BackendUnavailable, BudgetError


def measure(case: Case) -> dict[str, Any]:
    """What the case's side finds."""
    if case.is_ours:
        from vdnn.bench import peers_ours

        return peers_ours.measure(case)
    from vdnn.bench import peers_torch

    return peers_torch.measure(case)


def why(error: Exception) -> str:
    """Why a case has no times, in a line."""
    words = " ".join(str(error).split())
    if isinstance(error, BudgetError) or type(error).__name__ == "OutOfMemoryError":
        return f"does not fit: {words}"
    return " ".join(reason(error).split())


def main() -> int:
    """CASE [OUT]; 2 if the machine lacks what the case needs, which is then no result."""
    end_with_parent()
    case, out = Case.from_json(json.loads(sys.argv[1])), sys.argv[2:]
    if not out:
        from vdnn.bench import peers_torch

        peers_torch.warm(case)
        return 0
    try:
        found = measure(case)
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        found = {"failed": why(error)}
    part = Path(f"{out[0]}.part")
    part.write_text(json.dumps(found), encoding="utf-8")
    os.replace(part, out[0])
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the compiler's own workers are not waited for
