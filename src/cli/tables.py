"""Reports as tables and sentences for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from vdnn.memory.report import Report
from vdnn.units import MIB, exact_bytes, format_bytes, format_ms

TEXT_COLUMNS = 160
DIRECTIONS = {"forward": "fwd", "dgrad": "dgrad", "wgrad": "wgrad"}
"""What follows the dot in the kind of an op, and how it is called here; in the order in which it is shown."""
LAYER_CAPTION = (
    "fwd, bwd: most MiB live on the device while the layer runs forward and backward; ws: MiB of its largest "
    "workspace; off: MiB copied to the host after it; ms: its kernels, both directions and update; "
    "dgrad, wgrad: gradients of the input and of the weights"
)


def plan_summary(slab_bytes: int, host_bytes: int, step_ms: float, report: Report, limit: str) -> str:
    """One or two lines: peak against limit, what moves, expected time, where the numbers come from."""
    moved = f", {format_bytes(host_bytes)} on the host" if host_bytes else ", nothing offloaded"
    text = (
        f"plan: policy {report.policy}, device peak {exact_bytes(slab_bytes)}, limit {limit}{moved}; "
        f"step about {format_ms(step_ms)} ({report.cost_source})"
    )
    return "\n".join([text, *(f"plan: {note}" for note in report.notes)])


def wide_console() -> Console:
    """Standard output, as wide as the terminal; in a file or a pipe wide enough that no cell is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=TEXT_COLUMNS)


def print_report(report: Report, fits: bool, limit: str, console: Console, *, modelled: bool, layers: bool) -> None:
    """The whole report as tables.

    Args:
        limit: in words, with where it comes from.
        modelled: whether the machine is a profile's, so that its times are of no measurement.
        layers: whether the table of layers is shown.
    """
    simulated = " (modelled, not measured)" if modelled else ""
    console.print(
        f"{report.network}, batch size {report.batch_size}, policy {report.policy}, counting: {report.counting}",
        highlight=False,
    )
    table = Table("quantity", "value", title=None)
    table.columns[1].justify = "right"
    rows = [
        ("device peak", exact_bytes(report.device_peak_bytes)),
        ("  ideal (most bytes live at once)", exact_bytes(report.ideal_peak_bytes)),
        ("  fragmentation", f"{report.fragmentation:.2%}"),
        ("  at layer", report.peak_layer),
        ("device average over time", format_bytes(report.device_average_bytes)),
        ("device average over layer passes", format_bytes(report.device_average_passes_bytes)),
        ("host", exact_bytes(report.host_bytes)),
        ("offloaded", exact_bytes(report.offloaded_bytes)),
        *((f"  {name.replace('_', ' ')} at the peak", format_bytes(n)) for name, n in report.by_category.items()),
        (f"predicted step{simulated}", format_ms(report.predicted_step_ms)),
        ("  kernels", format_ms(report.compute_ms)),
        ("  copies out / in", f"{format_ms(report.copy_out_ms)} / {format_ms(report.copy_in_ms)}"),
        ("  not hidden by kernels", format_ms(report.exposed_ms)),
        ("times from", report.cost_source),
        (f"fits in {limit}", "yes" if fits else "NO"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    if layers:
        console.print(_layer_table(report))


def _layer_table(report: Report) -> Table:
    table = Table(
        "layer", "kind", "fwd", "bwd", "ws", "off", "ms", "algorithms", caption=LAYER_CAPTION, caption_justify="left"
    )
    for column in table.columns[2:7]:
        column.justify = "right"
    for row in report.layers:
        sizes = (row.forward_bytes, row.backward_bytes, row.workspace_bytes, row.offloaded_bytes)
        table.add_row(row.layer, row.kind, *map(_mib, sizes), f"{row.time_ms:,.2f}", _algorithm_words(row.algorithms))
    return table


def _mib(count: int) -> str:
    """MiB with one decimal; nothing at all is "0", which 0.0 is not."""
    if not count:
        return "0"
    return f"{count / MIB:,.1f}" if count >= 0.05 * MIB else "<0.1"


def _algorithm_words(algorithms: Mapping[str, str]) -> str:
    """ "fwd/wgrad GEMM, dgrad FFT": algorithms by the directions that they compute."""
    directions: dict[str, list[str]] = {}
    order = list(DIRECTIONS)
    ends = {kind.partition(".")[2]: algorithm for kind, algorithm in algorithms.items()}
    for end in sorted(ends, key=lambda end: order.index(end) if end in order else len(order)):
        directions.setdefault(ends[end], []).append(DIRECTIONS.get(end, end))
    return ", ".join(f"{'/'.join(names)} {algorithm}" for algorithm, names in directions.items())
