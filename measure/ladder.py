"""Measure the effect of each optimisation: from plain fp32 to the fastest, or each one switched off."""
import platform
import statistics
from typing import NamedTuple

from measure.runs import WARM_UP, aligned, recorded, run_script
from runtime import guard
from runtime.config import BadInput
from runtime.progress import track


# speedups on a GPU that the five guides of docs/guides.md expect
PROMISED = {
    "TF32": "1.2-1.5",
    "mixed precision": "2-3",
    "no checkpointing": "1.2-1.3",
    "loader": "1.5-2",
    "torch.compile": "1.2-1.5",
    "attention kernel": "2-3 of attention",
    "parallel rewards": "2-4 of rewards",
}


class Optimisation(NamedTuple):
    """A name and {option: (value when off, value when on)}."""
    name: str
    options: dict

    def has_effect(self):
        return any(off != on for off, on in self.options.values())


def optimisations(stage, hw, script, given, processes):
    """Return the Optimisations that have an effect on this device, in the guides' order but with TF32 first:
    in mixed precision no fp32 product is left for it.

    script: the stage's Config. given: {option: value} from the command line, used as the value when on.
    processes: the number that the last row of grpo runs.
    """
    cuda = hw.device.type == "cuda"
    compilation = Optimisation("torch.compile", {"compile": (False, cuda)})
    candidates = [
        Optimisation("TF32", {"tf32": (False, hw.tf32)}),
        Optimisation(f"mixed precision, {hw.dtype}", {"dtype": ("fp32", hw.dtype)}),
    ]
    if stage == "grpo":
        candidates += [
            Optimisation("parallel rewards", {"reward_pool": ("serial", "process")}),
            compilation,
            Optimisation("CUDA graphs", {"cuda_graphs": (not cuda, True)}),
            Optimisation(f"{processes} processes", {"ranks": (1, processes)}),
        ]
    else:
        candidates += training_optimisations(hw, script, compilation)
    chosen = []
    for one in candidates:
        options = {option: (off, given.get(option, on)) for option, (off, on) in one.options.items()}
        as_given = Optimisation(one.name, options)
        if as_given.has_effect() and (one.has_effect() or one is compilation):
            chosen.append(as_given)
    return chosen


def training_optimisations(hw, script, compilation):
    """Return the Optimisations of train.py that follow mixed precision."""
    cuda = hw.device.type == "cuda"
    cpu = hw.device.type == "cpu"
    batch_size = script.batch_size
    accumulation = script.gradient_accumulation_steps
    divisors = [n for n in range(1, max(1, batch_size // 4) + 1) if batch_size % n == 0]
    small_batch = max(divisors)
    micro_batch = {
        "batch_size": (small_batch, batch_size),
        "gradient_accumulation_steps": (accumulation * batch_size // small_batch, accumulation),
    }
    loader = {"num_workers": (0, 2 if cuda else 1)}
    if cuda:
        loader["pin_memory"] = (False, True)
    plain_attention = "sdpa" if cpu and hw.dtype == "bf16" else "math"
    glibc = cpu and platform.libc_ver()[0] == "glibc"
    return [
        Optimisation("no checkpointing", {"gradient_checkpointing": (True, False)}),
        Optimisation("loader processes", loader),
        Optimisation(f"micro-batch {small_batch} -> {batch_size}", micro_batch),
        compilation,
        Optimisation("fused AdamW", {"fused_adamw": (False, True)}),
        Optimisation("attention kernel", {"attention": (plain_attention, "auto")}),
        Optimisation("memory kept", {"keep_memory": (not glibc, True)}),
    ]


def rows_of(chosen, ladder):
    """Return [(name, options)]: with ladder, off, then one more on each; else all on, then each one off."""
    off = {option: values[0] for one in chosen for option, values in one.options.items()}
    on = {option: values[1] for one in chosen for option, values in one.options.items()}
    if ladder:
        rows = [("plain, fp32", off)]
        for one in chosen:
            rows.append((f"+ {one.name}", rows[-1][1] | {option: on[option] for option in one.options}))
        return rows
    rows = [("everything on", on)]
    for one in chosen:
        if one.name == "TF32" and on.get("dtype", "fp32") != "fp32":               # no effect in bf16
            continue
        name = f"without {one.name}".replace("without no ", "with ")
        rows.append((name, on | {option: off[option] for option in one.options}))
    return rows


def print_rows(table, unit, ladder, losses, log):
    """Log the table of bench_ladder. losses: whether losses can be compared between rows."""
    lines = [["", "s/step (min-max)", unit, "fastest", "gain", "peak GiB"]]
    energy = any(row["joules_a_step"] for row in table)
    lines[0] += ["in all", "guides"] * ladder + ["J/step"] * energy + ["loss", "off fp32"] * losses
    for row in table:
        seconds = [run["step_s"] for run in row["repeats"]]
        line = [row["name"], f"{row['step_s']:.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
                f"{row['rate']:,.1f}", f"{row['fastest']:,.1f}", ratio(row["gain"]),
                f"{row['peak_memory_gb']:.2f}"]
        line += [ratio(row["in_all"]), row["promised"] or "-"] * ladder
        line += ["-" if row["joules_a_step"] is None else f"{row['joules_a_step']:,.1f}"] * energy
        if losses:
            off = row["off_fp32"]
            line += [f"{row['loss']:.4f}", "-" if off is None else f"{off:+.2%}{' !' * (abs(off) > 0.05)}"]
        lines.append(line)
    for line in ("", *aligned(lines)):
        log(line)
    gain = "gain: speed with everything on, over the row's. "
    if ladder:
        gain = "gain: over the row above; in all: over the first row; guides: as they expect. "
    compared = ("Losses are not compared: they are zero by construction, and another precision samples other "
                "tokens.")
    if losses:
        compared = "loss: of the last step; off fp32: its deviation from the first fp32 row, ! above 5%."
    log(f"{gain}Speeds are medians of steps, then of runs; ratios\n"
        f"use the fastest steps of all runs, which repeat best (docs/notes.md).\n{compared}")


def ratio(value):
    return "-" if value is None else f"{value:.2f}"


def run_rows(work, rows, repeats, log):
    """Run every row once a turn, and return ({name: its runs}, {name: error message})."""
    runs = {}
    failed = {}
    turns = [row for _ in range(repeats) for row in rows]
    for name, options in track(turns, "measuring", "runs"):
        if name in failed:
            continue
        try:
            run = run_script(work, options)
        except (BadInput, guard.Failure) as e:
            if name == rows[0][0] and name not in runs:
                raise
            failed[name] = str(e)
            continue
        if name == "+ torch.compile" and options["compile"] and not run["settings"]["compile"]:
            failed[name] = "torch.compile failed"
            continue
        runs.setdefault(name, []).append(run)
        log(f"{name}: {run['step_s']:.3f} s a step, {run['rate']:,.1f} {work.unit}, "
            f"{run['peak_memory_gb']:.2f} GiB, loss {run['loss']:.4f}")       # left if the process is killed
    return runs, failed


def table_row(name, options, runs, before, first, ladder, most):
    """Return the figures of a row. before: the row it is compared with; first: the table's first row; both
    None for the first row itself. most: sequences of a rank in a step, or 0."""
    settings = runs[0]["settings"]
    fastest = max(run["fastest"] for run in runs)
    gain = None
    if before:                               # --ablate: the speed with everything on, over the row's
        gain = fastest / before["fastest"] if ladder else before["fastest"] / fastest
    micro_batch = settings.get("micro_batch", 0)
    expected = min(options.get("batch_size", micro_batch), most or micro_batch)
    if micro_batch != expected:
        name += f" (micro-batch {micro_batch}: {expected} does not fit)"
    figures = ("step_s", "rate", "peak_memory_gb", "loss")
    medians = {figure: statistics.median(run[figure] for run in runs) for figure in figures}
    joules = [run["joules_a_step"] for run in runs if run["joules_a_step"]]
    return medians | {
        "name": name,
        "options": options,
        "settings": settings,
        "rates": [run["rate"] for run in runs],
        "fastest": fastest,
        "gain": gain,
        "promised": next((text for start, text in PROMISED.items() if name.startswith(f"+ {start}")), None),
        "joules_a_step": statistics.median(joules) if joules else None,
        "in_all": fastest / first["fastest"] if before and ladder else None,
        "repeats": recorded(runs),
    }


def bench_ladder(cfg, hw, work, script_args, log):
    """Measure --ladder or --ablate: each row runs the script with other options, the same seed and data. A
    row whose run had the same settings as the row it is compared with is left out; a row that fails keeps
    the runs before the failure."""
    own_rows = {"dtype", "tf32", "batch_size", "gradient_accumulation_steps"}
    given = {option: getattr(work.config, option) for option in script_args.given - own_rows}
    given = {option: value for option, value in given.items() if value is not None}
    rows = rows_of(optimisations(cfg.stage, hw, work.config, given, work.ranks), cfg.ladder)
    log(f"{work.description}, {work.steps} steps a run after {WARM_UP}, "
        f"{len(rows)} alternating rows x {cfg.repeats}, on {hw.name}")
    runs, failed = run_rows(work, rows, cfg.repeats, log)
    table = []
    for name, options in rows:
        if name in failed:
            count = f"{len(runs[name])} runs, then" if name in runs else "left out,"
            log(f"{name}: {count} it failed: {failed[name]}")
        if name not in runs:
            continue
        first = table[0] if table else None
        before = table[-1] if table and cfg.ladder else first
        if before and runs[name][0]["settings"] == before["settings"]:
            log(f"{name}: left out, it had no effect here.")
            continue
        most = work.sequences // work.ranks
        table.append(table_row(name, options, runs[name], before, first, cfg.ladder, most))
    fp32_loss = next((row["loss"] for row in table if row["settings"]["dtype"] == "fp32"), None)
    comparable = cfg.stage != "grpo"
    for row in table:
        row["off_fp32"] = row["loss"] / fp32_loss - 1 if comparable and fp32_loss is not None else None
    print_rows(table, work.unit, cfg.ladder, comparable, log)
    rates = {row["name"]: row["rates"] for row in table}
    return {"what": work.description, "unit": work.unit, "rows": table, "failed": failed, "rates": rates}
