"""From the plainest way of training to the fastest, one optimisation at a time: their knobs, runs in turn,
what each buys."""
import platform
import statistics
from typing import NamedTuple

from tqdm import tqdm

from measure.runs import WARM_UP, a_run, raw
from runtime import guard
from runtime.config import BadInput


class Rung(NamedTuple):
    """What is switched on at a step of the ladder: a name, and of each of its knobs the plain value and the
    other."""
    name: str
    knobs: dict


def rungs(stage, hw, script, given, processes):
    """Of this device, in the order of the guides, but TF32 first: after mixed precision it has no product of
    fp32 left. A knob that was handed over is that value when it is on; what then changes nothing is no rung.
    script: its Config as it is; given: knobs that were handed over, None aside; processes: when there are
    several."""
    cuda, cpu = hw.device.type == "cuda", hw.device.type == "cpu"
    precision = Rung(f"mixed precision, {hw.dtype}", {"dtype": ("fp32", hw.dtype)})
    compiled = Rung("torch.compile", {"compile": (False, cuda)})
    if stage == "grpo":
        found = [Rung("TF32", {"tf32": (False, hw.tf32)}), precision, Rung("parallel rewards", {"reward_pool": ("serial", "process")}),
                 compiled, Rung("CUDA graphs", {"cuda_graphs": (not cuda, True)}),
                 Rung(f"{processes} processes", {"ranks": (1, processes)})]
    else:
        rows, passes = script.batch_size, script.gradient_accumulation_steps
        few = max(n for n in range(1, max(1, rows // 4) + 1) if rows % n == 0)
        workers = {"num_workers": (0, 2 if cuda else 1)} | ({"pin_memory": (False, True)} if cuda else {})
        found = [Rung("TF32", {"tf32": (False, hw.tf32)}), precision, Rung("no checkpointing", {"gradient_checkpointing": (True, False)}),
                 Rung("loader processes", workers),
                 Rung(f"micro-batch {few} -> {rows}", {
                     "batch_size": (few, rows), "gradient_accumulation_steps": (passes * rows // few, passes)}), compiled,
                 Rung("fused AdamW", {"fused_adamw": (False, True)}),
                 Rung("attention kernel", {"attention": ("sdpa" if cpu and hw.dtype == "bf16" else "math", "auto")}),
                 Rung("memory kept", {"keep_memory": (not (cpu and platform.libc_ver()[0] == "glibc"), True)})]
    found = [rung for rung in found if rung is compiled or any(plain != on for plain, on in rung.knobs.values())]
    found = [Rung(name, {k: (plain, given.get(k, on)) for k, (plain, on) in knobs.items()}) for name, knobs in found]
    return [rung for rung in found if any(plain != on for plain, on in rung.knobs.values())]


def rows_of(found, ladder):
    """[(name, knobs)] of the ladder, or of everything on and each rung left out."""
    plain, on = ({k: pair[side] for rung in found for k, pair in rung.knobs.items()} for side in (0, 1))
    if ladder:
        rows, knobs = [("plain, fp32", plain)], plain
        for name, changes in found:
            knobs = knobs | {k: on[k] for k in changes}
            rows.append((f"+ {name}", knobs))
        return rows
    # without effect in bf16
    left_out = [(rung.name, rung.knobs) for rung in found if rung.name != "TF32" or on["dtype"] == "fp32"]
    return [("everything on", on)] + [
        (f"without {name}".replace("without no ", "with "), on | {k: plain[k] for k in knobs}) for name, knobs in left_out]


def print_rows(table, unit, ladder, losses, say):
    """table: a row of bench_rungs a line."""
    columns = {"name": "", "step": "s/step (min-max)", "rate": unit, "fastest": "fastest", "gain": "gain" if ladder else "it buys",
               "turns": "of turns", "in_all": "in all", "peak_memory_gb": "peak GiB", "loss": "loss", "off_fp32": "off fp32"}
    forms = {"rate": ",.1f", "fastest": ",.1f", "gain": ".2f", "in_all": ".2f", "peak_memory_gb": ".2f", "loss": ".4f",
             "off_fp32": "+.2%"}
    for key in (() if ladder else ("in_all",)) + (() if losses else ("loss", "off_fp32")):
        del columns[key]
    lines = [list(columns.values())]
    for row in table:
        each = [run["step_s"] for run in row["repeats"]]
        row = row | {"step": f"{row['step_s']:.3f} ({min(each):.3f}-{max(each):.3f})",
                     "turns": row["turns"] and f"{min(row['turns']):.2f}-{max(row['turns']):.2f}"}
        lines.append(["-" if row[key] is None else format(row[key], forms.get(key, "")) for key in columns])
        lines[-1][-1] += " !" if abs(row["off_fp32"] or 0) > 0.05 else ""
    widths = [max(map(len, column)) for column in zip(*lines)]
    say("")
    for line in lines:
        say("  ".join([line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]))
    say(("Gain: over the row above; in all: over the "
         "first. " if ladder else "It buys: everything on, over the row. ")
        + "Speeds are medians of steps, then of runs; ratios\nare of the fastest steps of all runs, which "
          "repeat best (NOTES.md); "
        + "of turns: least and most of the same for the runs of a turn.\n"
        + ("Loss: of the last step; off fp32: from that of the first row in fp32, ! above 5%." if losses else
           "No column compares losses, which are zero by construction, or gradients: in another precision "
           "other tokens are sampled."))


def bench_rungs(cfg, hw, work, handed, say):
    """The ladder, or the ablation: every row is the script itself with other knobs, the same seed and data. A
    row whose run turns out to have had the settings of the row that it is compared with (torch.compile
    failed, say) is left out; one that fails counts as far as it came."""
    given = {k: getattr(work.config, k) for k in handed.given - {"dtype", "tf32", "batch_size", "gradient_accumulation_steps"}}
    given = {k: value for k, value in given.items() if value is not None}
    rows, runs, failed = rows_of(rungs(cfg.stage, hw, work.config, given, work.ranks), cfg.ladder), {}, {}
    say(f"{work.what}, {work.steps} steps a run after {WARM_UP}, {len(rows)} rows x {cfg.repeats} in turn, on "
        f"{hw.name}")
    for name, knobs in tqdm([row for _ in range(cfg.repeats) for row in rows], "runs", leave=False, disable=None):
        try:
            if name not in failed:
                runs.setdefault(name, []).append(a_run(work, knobs))
        except (BadInput, guard.Failure) as e:
            if name == rows[0][0] and name not in runs:
                raise
            failed[name] = str(e)
    table = []
    for name, knobs in rows:
        if name in failed:
            say(f"{name}: {f'{len(runs[name])} runs, then' if name in runs else 'left out,'} it failed: "
                f"{failed[name]}")
        if name not in runs:
            continue
        mine, settings = runs[name], runs[name][0]["settings"]
        before = (table[-1] if cfg.ladder else table[0]) if table else None
        if before and settings == before["settings"]:
            say(f"{name}: left out, it had no effect here.")
            continue
        fastest = max(run["fastest"] for run in mine)
        speed = before and fastest / before["fastest"]
        turns = before and [a["fastest"] / b["fastest"] for a, b in zip(mine, before["repeats"])]
        if settings.get("micro_batch", 0) != (expected := knobs.get("batch_size", settings.get("micro_batch", 0))):
            name += f" (micro-batch {settings['micro_batch']}: {expected} does not fit)"
        table.append({
            "name": name, "knobs": knobs, "settings": settings, "step_s": statistics.median(r["step_s"] for r in mine),
            "rate": statistics.median(r["rate"] for r in mine), "rates": [r["rate"] for r in mine], "fastest": fastest,
            "gain": speed if cfg.ladder or speed is None else 1 / speed,
            "turns": turns if cfg.ladder or turns is None else [1 / turn for turn in turns],
            "in_all": fastest / table[0]["fastest"] if before and cfg.ladder else None,
            "peak_memory_gb": statistics.median(r["peak_memory_gb"] for r in mine), "loss": statistics.median(r["loss"] for r in mine),
            "repeats": raw(mine)})
    exact = next((row["loss"] for row in table if row["settings"]["dtype"] == "fp32"), None)
    for row in table:
        row["off_fp32"] = None if exact is None or cfg.stage == "grpo" else row["loss"] / exact - 1
    print_rows(table, work.unit, cfg.ladder, cfg.stage != "grpo", say)
    return {"what": work.what, "unit": work.unit, "rows": table, "failed": failed, "rates": {row["name"]: row["rates"] for row in table}}
