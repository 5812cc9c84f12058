"""The benchmark's results as Markdown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

BESIDE = {"compiled": "the same with `compile()`", "shortest": "the same as a bare loop of torch operations"}


def write(results: dict[str, Any], out: Path) -> None:
    """Write `benchmark.json` and `benchmark.md`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmark.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sections = [
        _head(results),
        _cases(results),
        _long(results),
        _learn(results),
        _profile(results),
        _environments(results),
        _growth(results),
    ]
    (out / "benchmark.md").write_text("\n".join(filter(None, sections)), encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _ms(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 10
        else f"{seconds * 1e3:,.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e6:,.0f} µs"
    )


def _head(results: dict[str, Any]) -> str:
    m, rate = results["machine"], results["matmul_rate"] / 1e9
    return f"""# Benchmark

Made by `scripts/benchmark.py` on {results["date"]}: {m["cpu"]}, {m["cores"]} cores, {rate:.0f} GFLOP/s in float32
matrix products; Python {m["python"]}, torch {m["torch"]} (CPU). The artifact is the author's JAX code (JeanKaddour/tpo)
in an environment of its own. Both sides stand ready and take turns; a time is the median, a ratio the median of the
ratios of the turns, with the smallest and the largest. Not measured on a GPU: none was at hand.
"""


def _ratios(entry: dict[str, Any], side: str = "ours") -> list[float]:
    return [b / a for a, b in zip(entry["seconds"][side], entry["seconds"]["artifact"], strict=True)]


def _in_turns(ratios: list[float]) -> str:
    return f"**{statistics.median(ratios):.1f}** ({min(ratios):.1f} to {max(ratios):.1f})"


def _cases(results: dict[str, Any]) -> str:
    from benchmark import NAMES, TARGETS

    rows = []
    for case, entry in results.get("cases", {}).items():
        ours, theirs = (entry["seconds"][side] for side in ("ours", "artifact"))
        floor = entry["flops"] / results["matmul_rate"] if "flops" in entry else None
        rows.append(
            [
                NAMES[case],
                _ms(statistics.median(theirs)) if theirs else "",
                _ms(statistics.median(ours)),
                _in_turns(_ratios(entry)) if theirs else "",
                str(TARGETS.get(case, 3)),
                f"{entry['flops'] / 1e9:,.2f} GFLOP, {_ms(floor)}" if floor else "",
            ]
        )
        for side in sorted(entry["seconds"].keys() & BESIDE):
            ratio = _in_turns(_ratios(entry, side)) if theirs else ""
            rows.append([BESIDE[side], "", _ms(statistics.median(entry["seconds"][side])), ratio, "", ""])
    head = ["work", "artifact", "ours", "artifact / ours", "wanted", "needed at least"]
    note = """
Through `learn()`, per update, at the start of training, float32. "Needed at least": the matrix products of an update
whose prompts are computed once per group and each token once, at the rate above; prefixes that candidates share, and
what no one reads, cost less still. Compiling does not count, on neither side: it takes `compile()` 5 to 15 s for MNIST,
1 to 2 minutes for a transformer, and less from the compiler's cache.
"""
    return "## Beside the artifact\n\n" + _table(head, rows) + note if rows else ""


def _long(results: dict[str, Any]) -> str:
    from benchmark import LONG_TARGETS, NAMES

    rows = []
    for case, entry in results.get("cases", {}).items():
        if "long" in entry and entry["seconds"]["artifact"]:
            theirs, ours = statistics.median(entry["seconds"]["artifact"]), entry["long"]["seconds"]
            rows.append(
                [
                    NAMES[case],
                    f"{entry['long']['updates']:,}",
                    _ms(theirs),
                    _ms(ours),
                    f"**{theirs / ours:.1f}**",
                    str(LONG_TARGETS[case]),
                ]
            )
    head = ["work", "updates", "artifact", "ours, mean", "artifact / ours", "wanted"]
    note = """
The artifact's updates cost the same from the first to the last; ours become cheaper as a group's candidates agree.
"""
    return "## Averaged over a whole run\n\n" + _table(head, rows) + note if rows else ""


def _learn(results: dict[str, Any]) -> str:
    from benchmark import NAMES

    rows = []
    for case, entry in results.get("learn", {}).items():
        bare = entry["seconds"]["bare"]
        row = [NAMES[case], _ms(statistics.median(bare))]
        for way in ("learn", "logged"):
            seconds = entry["seconds"].get(way)
            more = statistics.median(a / b for a, b in zip(seconds, bare, strict=True)) - 1 if seconds else 0.0
            row.append(f"{_ms(statistics.median(seconds))}, {more * 100:+.0f} %" if seconds else "")
        rows.append(row)
    return (
        "## What `learn()` adds\n\n"
        + _table(["work", "the update alone", "`learn()`", "with TensorBoard"], rows)
        + "\nThe last column writes an entry for every update, whose diagnostics evaluate all candidates once more; "
        "`log_interval` makes\nthem fewer.\n"
        if rows
        else ""
    )


def _profile(results: dict[str, Any]) -> str:
    from benchmark import NAMES

    columns = results.get("profile", {})
    if not columns:
        return ""
    kinds = list(next(iter(columns.values())))
    rows = [[kind, *(f"{column[kind]:.1f}" for column in columns.values())] for kind in kinds]
    note = "\nMilliseconds per update at the start of training, one thread, from torch's profiler.\n"
    return "## Where the time goes\n\n" + _table(["", *(NAMES[case] for case in columns)], rows) + note


def _environments(results: dict[str, Any]) -> str:
    rows = [
        [name, f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"]
        for name, value in results.get("environments", {}).items()
    ]
    return "## Environments\n\n" + _table(["what", "value"], rows) if rows else ""


def _growth(results: dict[str, Any]) -> str:
    rows = []
    for entry in results.get("growth", {}).values():
        b, k, h = entry["size"]
        tokens = b * k * h
        limit = "all at once" if entry["batch_size"] is None else f"{entry['batch_size']:,}"
        added = entry["peak_mib"] - entry["before_mib"]
        rows.append(
            [
                f"{tokens:,}",
                f"{b} x {k} x {h}",
                limit,
                _ms(entry["seconds"]),
                _ms(entry["seconds"] / tokens * 1000),
                f"{added:,.0f} MiB",
            ]
        )
    head = ["B·K·H", "B x K x H", "`batch_size`", "time per update", "per 1,000 tokens", "memory above the start"]
    return "## Growth (terminal reward, V=8, TPO)\n\n" + _table(head, rows) if rows else ""
