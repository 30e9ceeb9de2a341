"""From the plainest way of training to the fastest, one optimisation at a time: their knobs, and what they buy in tables."""
import platform
from typing import NamedTuple


class Rung(NamedTuple):
    """What is switched on at a step of the ladder: a name, and of each of its knobs the plain value and the other."""
    name: str
    knobs: dict


def rungs(stage, hw, script, given, processes):
    """Of this device, in the order of the guides, but TF32 first: after mixed precision it has no product of fp32 left. A knob that was
    handed over is that value when it is on; what then changes nothing is no rung. script: its Config as it is; given: knobs that were
    handed over, None aside; processes: when there are several."""
    cuda, cpu = hw.device.type == "cuda", hw.device.type == "cpu"
    precision = Rung(f"mixed precision, {hw.dtype}", {"dtype": ("fp32", hw.dtype)})
    compiled = Rung("torch.compile", {"compile": (False, cuda)})
    if stage == "grpo":
        found = [Rung("TF32", {"tf32": (False, hw.tf32)}), precision, Rung("parallel rewards", {"reward_pool": ("serial", "process")}),
                 compiled, Rung("CUDA graphs", {"cuda_graphs": (not cuda, True)}),
                 Rung(f"{processes} processes", {"processes": (1, processes)})]
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
    left_out = [(rung.name, rung.knobs) for rung in found if rung.name != "TF32" or on["dtype"] == "fp32"]       # without effect in bf16
    return [("everything on", on)] + [
        (f"without {name}".replace("without no ", "with "), on | {k: plain[k] for k in knobs}) for name, knobs in left_out]


def print_rows(table, unit, ladder, losses, say):
    """table: a row of bench_rungs a line."""
    columns = {"name": "", "step": "s/step (min-max)", "rate": unit, "gain": "gain" if ladder else "it buys", "in_all": "in all",
               "peak_memory_gb": "peak GiB", "loss": "loss", "off_fp32": "off fp32"}
    forms = {"rate": ",.1f", "gain": ".2f", "in_all": ".2f", "peak_memory_gb": ".2f", "loss": ".4f", "off_fp32": "+.2%"}
    for key in (() if ladder else ("in_all",)) + (() if losses else ("loss", "off_fp32")):
        del columns[key]
    lines = [list(columns.values())]
    for row in table:
        each = [run["step_s"] for run in row["repeats"]]
        row = row | {"step": f"{row['step_s']:.3f} ({min(each):.3f}-{max(each):.3f})"}
        lines.append(["-" if row[key] is None else format(row[key], forms.get(key, "")) for key in columns])
        lines[-1][-1] += " !" if abs(row["off_fp32"] or 0) > 0.05 else ""
    widths = [max(map(len, column)) for column in zip(*lines)]
    say("")
    for line in lines:
        say("  ".join([line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]))
    say(("Gain: over the row above; in all: over the first. " if ladder else "It buys: everything on, over the row. ")
        + "Speeds are medians of steps, then of runs; ratios of runs of one turn.\n"
        + ("Loss: of the last step; off fp32: from that of the first row in fp32, ! above 5%." if losses else
           "No column compares losses, which are zero by construction, or gradients: in another precision other tokens are sampled."))
