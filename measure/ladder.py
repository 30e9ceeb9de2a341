"""From the plainest way of training to the fastest, one optimisation at a time: their knobs, runs in turn,
what each buys."""
import platform
import statistics
from typing import NamedTuple

from measure.runs import WARM_UP, a_run, raw
from runtime import guard
from runtime.config import BadInput
from runtime.progress import track


class Rung(NamedTuple):
    """What is switched on at a step of the ladder: a name, and {knob: (the plain value, the other)}."""
    name: str
    knobs: dict

    def changes_something(self):
        return any(plain != on for plain, on in self.knobs.values())


def rungs(stage, hw, script, given, processes):
    """Return the Rungs of this device, in the order of the guides, but TF32 first: after mixed precision it
    has no product of fp32 left. A knob that was handed over is that value when it is on; what then changes
    nothing is no rung.

    script: its Config as it is. given: knobs that were handed over, None aside. processes: when there are
    several.
    """
    cuda = hw.device.type == "cuda"
    compile_rung = Rung("torch.compile", {"compile": (False, cuda)})
    candidates = [
        Rung("TF32", {"tf32": (False, hw.tf32)}),
        Rung(f"mixed precision, {hw.dtype}", {"dtype": ("fp32", hw.dtype)}),
    ]
    if stage == "grpo":
        candidates += [
            Rung("parallel rewards", {"reward_pool": ("serial", "process")}),
            compile_rung,
            Rung("CUDA graphs", {"cuda_graphs": (not cuda, True)}),
            Rung(f"{processes} processes", {"ranks": (1, processes)}),
        ]
    else:
        candidates += training_rungs(hw, script, compile_rung)
    candidates = [rung for rung in candidates if rung is compile_rung or rung.changes_something()]
    candidates = [
        Rung(name, {knob: (plain, given.get(knob, on)) for knob, (plain, on) in knobs.items()})
        for name, knobs in candidates
    ]
    return [rung for rung in candidates if rung.changes_something()]


def training_rungs(hw, script, compile_rung):
    """Return the Rungs of train.py that follow mixed precision."""
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
        Rung("no checkpointing", {"gradient_checkpointing": (True, False)}),
        Rung("loader processes", loader),
        Rung(f"micro-batch {small_batch} -> {batch_size}", micro_batch),
        compile_rung,
        Rung("fused AdamW", {"fused_adamw": (False, True)}),
        Rung("attention kernel", {"attention": (plain_attention, "auto")}),
        Rung("memory kept", {"keep_memory": (not glibc, True)}),
    ]


def rows_of(chosen, ladder):
    """Return [(name, knobs)] of the chosen Rungs: the ladder, or everything on and each of them left out."""
    plain = {knob: values[0] for rung in chosen for knob, values in rung.knobs.items()}
    on = {knob: values[1] for rung in chosen for knob, values in rung.knobs.items()}
    if ladder:
        knobs = plain
        rows = [("plain, fp32", plain)]
        for rung in chosen:
            knobs = knobs | {knob: on[knob] for knob in rung.knobs}
            rows.append((f"+ {rung.name}", knobs))
        return rows
    rows = [("everything on", on)]
    for rung in chosen:
        if rung.name == "TF32" and on.get("dtype", "fp32") != "fp32":              # without effect in bf16
            continue
        name = f"without {rung.name}".replace("without no ", "with ")
        rows.append((name, on | {knob: plain[knob] for knob in rung.knobs}))
    return rows


def print_rows(table, unit, ladder, losses, log):
    """Log a line for each row of bench_rungs. losses: whether they can be compared."""
    columns = {
        "name": "",
        "step": "s/step (min-max)",
        "rate": unit,
        "fastest": "fastest",
        "gain": "gain" if ladder else "it buys",
        "turns": "of turns",
        "in_all": "in all",
        "peak_memory_gb": "peak GiB",
        "loss": "loss",
        "off_fp32": "off fp32",
    }
    formats = {
        "rate": ",.1f",
        "fastest": ",.1f",
        "gain": ".2f",
        "in_all": ".2f",
        "peak_memory_gb": ".2f",
        "loss": ".4f",
        "off_fp32": "+.2%",
    }
    if not ladder:
        del columns["in_all"]
    if not losses:
        del columns["loss"]
        del columns["off_fp32"]
    lines = [list(columns.values())]
    for row in table:
        seconds = [run["step_s"] for run in row["repeats"]]
        step = f"{row['step_s']:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
        turns = row["turns"] and f"{min(row['turns']):.2f}-{max(row['turns']):.2f}"
        row = row | {"step": step, "turns": turns}
        line = ["-" if row[key] is None else format(row[key], formats.get(key, "")) for key in columns]
        if abs(row["off_fp32"] or 0) > 0.05:
            line[-1] += " !"
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    log("")
    for line in lines:
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        log("  ".join([line[0].ljust(widths[0]), *numbers]))
    gain = "It buys: everything on, over the row. "
    if ladder:
        gain = "Gain: over the row above; in all: over the first. "
    compared = ("No column compares losses, which are zero by construction, or gradients: in another "
                "precision other tokens are sampled.")
    if losses:
        compared = "Loss: of the last step; off fp32: from that of the first row in fp32, ! above 5%."
    log(f"{gain}Speeds are medians of steps, then of runs; ratios\n"
        "are of the fastest steps of all runs, which repeat best (docs/notes.md); "
        f"of turns: least and most of the same for the runs of a turn.\n{compared}")


def run_in_turn(work, rows, repeats):
    """Return ({name: its runs}, {name: why it failed}) of the rows, each of which runs once a turn."""
    runs = {}
    failed = {}
    turns = [row for _ in range(repeats) for row in rows]
    for name, knobs in track(turns, "measuring", "runs"):
        if name in failed:
            continue
        try:
            run = a_run(work, knobs)
        except (BadInput, guard.Failure) as e:
            if name == rows[0][0] and name not in runs:
                raise
            failed[name] = str(e)
            continue
        runs.setdefault(name, []).append(run)
    return runs, failed


def table_row(name, knobs, runs, before, first, ladder):
    """Return what a row's runs come to. before: the row that it is compared with; first: of the table; None
    for the first itself."""
    settings = runs[0]["settings"]
    fastest = max(run["fastest"] for run in runs)
    gain = None
    turns = None
    if before:
        gain = fastest / before["fastest"]
        turns = [run["fastest"] / other["fastest"] for run, other in zip(runs, before["repeats"])]
        if not ladder:
            gain = 1 / gain
            turns = [1 / turn for turn in turns]
    micro_batch = settings.get("micro_batch", 0)
    expected = knobs.get("batch_size", micro_batch)
    if micro_batch != expected:
        name += f" (micro-batch {micro_batch}: {expected} does not fit)"
    return {
        "name": name,
        "knobs": knobs,
        "settings": settings,
        "step_s": statistics.median(run["step_s"] for run in runs),
        "rate": statistics.median(run["rate"] for run in runs),
        "rates": [run["rate"] for run in runs],
        "fastest": fastest,
        "gain": gain,
        "turns": turns,
        "in_all": fastest / first["fastest"] if before and ladder else None,
        "peak_memory_gb": statistics.median(run["peak_memory_gb"] for run in runs),
        "loss": statistics.median(run["loss"] for run in runs),
        "repeats": raw(runs),
    }


def bench_rungs(cfg, hw, work, script_args, log):
    """Measure the ladder, or the ablation: every row is the script itself with other knobs, the same seed and
    data. A row whose run turns out to have had the settings of the row that it is compared with
    (torch.compile failed, say) is left out; one that fails counts as far as it came."""
    own_rungs = {"dtype", "tf32", "batch_size", "gradient_accumulation_steps"}
    given = {knob: getattr(work.config, knob) for knob in script_args.given - own_rungs}
    given = {knob: value for knob, value in given.items() if value is not None}
    rows = rows_of(rungs(cfg.stage, hw, work.config, given, work.ranks), cfg.ladder)
    log(f"{work.what}, {work.steps} steps a run after {WARM_UP}, "
        f"{len(rows)} rows x {cfg.repeats} in turn, on {hw.name}")
    runs, failed = run_in_turn(work, rows, cfg.repeats)
    table = []
    for name, knobs in rows:
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
        table.append(table_row(name, knobs, runs[name], before, first, cfg.ladder))
    fp32_loss = next((row["loss"] for row in table if row["settings"]["dtype"] == "fp32"), None)
    comparable = cfg.stage != "grpo"
    for row in table:
        row["off_fp32"] = row["loss"] / fp32_loss - 1 if comparable and fp32_loss is not None else None
    print_rows(table, work.unit, cfg.ladder, comparable, log)
    return {
        "what": work.what,
        "unit": work.unit,
        "rows": table,
        "failed": failed,
        "rates": {row["name"]: row["rates"] for row in table},
    }
