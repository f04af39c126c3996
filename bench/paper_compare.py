"""Two machines side by side: the numbers of two folders that `vdnn tables --out` has written.

print(compare(read_tables("h200"), read_tables("simulated")))
"""

from __future__ import annotations

from vdnn.bench.paper_files import Kept
from vdnn.bench.paper_text import number
from vdnn.errors import DataError


def compare(first: Kept, second: Kept) -> str:
    """Markdown: every number that both have, with the paper's; what only one has is counted."""
    both = [key for key in first.numbers if key in second.numbers]
    if not both:
        raise DataError("the two have no number in common; write both with the same figures")
    lines = [
        "## Two runs of the vDNN paper's cases",
        "",
        f"- first: {first.machine}",
        f"- second: {second.machine}",
        "",
        "| figure | network | bar | quantity | the paper | first | second | second / first |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for key in both:
        unit, paper, one = first.numbers[key]
        other = second.numbers[key][2]
        ratio = f"{other / one:.2f}" if one else ""
        figure, network, bar, quantity = key
        values = " | ".join(number(value, unit) for value in (paper, one, other))
        lines.append(f"| {figure} | {network} | {bar} | {quantity}, {unit} | {values} | {ratio} |")
    alone = [len(kept.numbers) - len(both) for kept in (first, second)]
    if any(alone):
        lines += ["", f"Numbers that only one has: {alone[0]} the first, {alone[1]} the second."]
    return "\n".join([*lines, ""])
