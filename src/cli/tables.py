"""Reports as tables and sentences for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vdnn.memory.report import Report
from vdnn.units import MIB, format_bytes

TEXT_COLUMNS = 160


def plan_summary(slab_bytes: int, host_bytes: int, step_ms: float, report: Report, limit_bytes: int | None) -> str:
    """One or two lines: peak against limit, what moves, expected time, where the numbers come from."""
    limit = f" of {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    moved = f", {format_bytes(host_bytes)} on the host" if host_bytes else ", nothing offloaded"
    text = (
        f"plan: policy {report.policy}, device peak {format_bytes(slab_bytes)}{limit}{moved}; "
        f"step about {step_ms:,.1f} ms ({report.cost_source})"
    )
    return "\n".join([text, *(f"plan: {note}" for note in report.notes)])


def wide_console() -> Console:
    """Standard output, as wide as the terminal; in a file or a pipe wide enough that no cell is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=TEXT_COLUMNS)


def print_report(report: Report, fits: bool, limit_bytes: int | None, console: Console, *, layers: bool) -> None:
    """The whole report as tables."""
    simulated = " (modelled, not measured)" if report.cost_source.startswith("modelled") else ""
    console.print(
        f"{report.network}, batch size {report.batch_size}, policy {report.policy}, counting: {report.counting}",
        highlight=False,
    )
    table = Table("quantity", "value", title=None)
    table.columns[1].justify = "right"
    rows = [
        ("device peak", format_bytes(report.device_peak_bytes)),
        ("  ideal (most bytes live at once)", format_bytes(report.ideal_peak_bytes)),
        ("  fragmentation", f"{report.fragmentation:.2%}"),
        ("  at layer", report.peak_layer),
        ("device average over time", format_bytes(report.device_average_bytes)),
        ("device average over layer passes", format_bytes(report.device_average_passes_bytes)),
        ("host", format_bytes(report.host_bytes)),
        ("offloaded", format_bytes(report.offloaded_bytes)),
        *((f"  {name.replace('_', ' ')} at the peak", format_bytes(n)) for name, n in report.by_category.items()),
        (f"predicted step{simulated}", f"{report.predicted_step_ms:,.2f} ms"),
        ("  kernels", f"{report.compute_ms:,.2f} ms"),
        ("  copies out / in", f"{report.copy_out_ms:,.2f} / {report.copy_in_ms:,.2f} ms"),
        ("  not hidden by kernels", f"{report.exposed_ms:,.2f} ms"),
        ("times from", report.cost_source),
    ]
    if limit_bytes is not None:
        rows.append((f"fits in {format_bytes(limit_bytes)}", "yes" if fits else "NO"))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for note in report.notes:
        console.print(note, highlight=False)
    if layers:
        console.print(_layer_table(report))


def _layer_table(report: Report) -> Table:
    table = Table("layer", "kind", "forward MiB", "backward MiB", "workspace MiB", "offloaded MiB", "ms", "algorithms")
    for column in table.columns[2:7]:
        column.justify = "right"
    for row in report.layers:
        table.add_row(
            row.layer,
            row.kind,
            *(f"{n / MIB:,.1f}" for n in (row.forward_bytes, row.backward_bytes)),
            *(f"{n / MIB:,.1f}" if n else "" for n in (row.workspace_bytes, row.offloaded_bytes)),
            f"{row.time_ms:,.2f}",
            ", ".join(dict.fromkeys(row.algorithms.values())),
        )
    return table
