"""What `scripts/bench load` says: tables, ratios to our own loader, shares of the ceilings, goals."""

from __future__ import annotations

import statistics
from typing import Any

from bench_load_peers import OURS, OURS_STARTING
from bench_load_rounds import Case, Record

from weightcached.cli.output import emit, print_table

GB = 1e9
MB = 1e6
LEAST = {"hot": 1.0, "cold": 0.95}  # of the best other loader
LEAST_OF_CEILING = 0.85


def rows(
    case: Case, record: Record, checkpoints: dict[str, dict[str, Any]], ceilings: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A line of the result for each loader of the case that was measured, in the order in which they were asked for."""
    nbytes = checkpoints[case.checkpoint]["bytes"]
    ceiling = ceiling_of(case, ceilings)
    found = []
    for loader, samples in record.samples.get(case.name, {}).items():
        rates = [nbytes / sample["seconds"] / GB for sample in samples]
        found.append(
            {
                "case": case.name,
                "checkpoint": case.checkpoint,
                "cache": case.cache,
                "ranks": case.ranks,
                "rank": case.rank,
                "loader": loader,
                "version": record.versions.get(loader),
                "runs": len(samples),
                "gb_per_second": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
                "seconds": statistics.median(sample["seconds"] for sample in samples),
                "of_ceiling": None if ceiling is None else statistics.median(rates) / ceiling,
                "read": statistics.median(sample["rchar"] for sample in samples) / nbytes,
                "bytes_compared": record.checked.get(case.what, {}).get(loader, 0),
                "samples": samples,
            }
        )
    ours = next((row["gb_per_second"]["median"] for row in found if row["loader"] == OURS), None)
    for row in found:
        row["ratio"] = None if ours is None else row["gb_per_second"]["median"] / ours
    return sorted(found, key=lambda row: -row["gb_per_second"]["median"])


def ceiling_of(case: Case, ceilings: list[dict[str, Any]]) -> float | None:
    """GB/s: hot, the slower of reading and of copying to a GPU, each at its best; cold, reading from the disk."""

    def best(*kinds: str) -> float | None:
        return max((row["bytes_per_second"] / GB for row in ceilings if row["kind"] in kinds), default=None)

    if case.cache != "hot":
        return best("direct", "cold")
    return min((rate for rate in (best("hot", "both"), best("copy")) if rate is not None), default=None)


def goals(results: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """What the design asks for on a GPU, with what came out."""
    if device == "cpu":
        return []
    found = []
    for ours in (row for row in results if row["loader"] == OURS):
        rate = ours["gb_per_second"]["median"]
        others = [row for row in results if row["case"] == ours["case"] and row["loader"] not in (OURS, OURS_STARTING)]
        if others:
            best = max(others, key=lambda row: row["gb_per_second"]["median"])
            ratio = rate / best["gb_per_second"]["median"]
            found.append(_goal(f"{ours['case']}: beside the best other, {best['loader']}", ratio, LEAST[ours["cache"]]))
        if ours["cache"] == "hot" and ours["ranks"] == 1 and ours["of_ceiling"] is not None:
            found.append(_goal(f"{ours['case']}: of the ceiling", ours["of_ceiling"], LEAST_OF_CEILING))
    rates = {row["case"]: row["gb_per_second"]["median"] for row in results if row["loader"] == OURS}
    if {"dense, hot", "moe, hot"} <= rates.keys():
        found.append(_goal("moe, hot: beside dense, hot", rates["moe, hot"] / rates["dense, hot"], 1.0))
    return found


def _goal(what: str, value: float, least: float) -> dict[str, Any]:
    return {"what": what, "value": value, "least": least, "met": value >= least}


def print_ceilings(ceilings: list[dict[str, Any]]) -> None:
    lines = [[row["what"], str(row["threads"]), f"{row['bytes_per_second'] / GB:.2f}"] for row in ceilings]
    print_table(["CEILING", "THREADS", "GB/S"], lines, right=("THREADS", "GB/S"))
    emit("")


def print_results(results: list[dict[str, Any]]) -> None:
    """One table. READ is what read calls gave over the checkpoint's bytes, PEAK how far resident memory grew."""
    numbers = ["GB/S", "MIN", "MAX", "RATIO", "CEILING", "SECONDS", "READ", "PEAK MB", "CPU S", "RUNS"]
    print_table(["CASE", "LOADER", *numbers], [_cells(row) for row in results], right=tuple(numbers))
    emit("")


def _cells(row: dict[str, Any]) -> list[str]:
    rates = row["gb_per_second"]
    peaks = [sample["host_peak"] for sample in row["samples"] if sample["host_peak"] is not None]
    return [
        row["case"],
        row["loader"],
        f"{rates['median']:.2f}",
        f"{rates['min']:.2f}",
        f"{rates['max']:.2f}",
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        "-" if row["of_ceiling"] is None else f"{row['of_ceiling']:.0%}",
        f"{row['seconds']:.3f}",
        f"{row['read']:.2f}",
        f"{max(peaks) / MB:,.0f}" if peaks else "-",
        f"{statistics.median(sample['cpu_seconds'] for sample in row['samples']):.1f}",
        str(row["runs"]),
    ]


def print_rest(record: Record, found: list[dict[str, Any]]) -> None:
    for goal in found:
        state = "met" if goal["met"] else "MISSED"
        emit(f"goal: {goal['what']}: {goal['value']:.2f}, at least {goal['least']:g}: {state}")
    for what, loaders in record.checked.items():
        emit(f"compared with the files, every byte: {what}: {', '.join(loaders)}")
    for loader, reason in record.missing.items():
        emit(f"{loader}: not measured: {reason}")
    for name, reason in record.failed.items():
        emit(f"{name}: failed: {reason}")
    for name in record.left_out:
        emit(f"left out, the budget was spent: {name}")
    for note in record.notes:
        emit(f"note: {note}")
