"""Summarise a folder of runs/domains.sh: tables and summary.json.

    python -m runs.domains out/domains
"""
import json
import math
from pathlib import Path
from statistics import fmean, stdev

from runtime import guard
from runtime.config import BadInput
from runtime.log import read_lines

# {runs: Student's t of a 95% interval of their mean}
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def read(path):
    """Return {model: figures} from the output of eval.py --json."""
    return {Path(row["model"]).name: row for row in json.loads(path.read_text())["models"]}


def cell(value, low, high, sign=""):
    return f"{100 * value:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def own(row, domain, name="accuracy"):
    """Return (value, low, high) of a figure in a domain; domain "macro": the mean over domains."""
    figures = {key.removeprefix("macro_"): value for key, value in row.items() if key.startswith("macro_")}
    figures = figures if domain == "macro" else row["domains"][domain]
    return tuple(figures[name + end] for end in ("", "_low", "_high"))


def over_seeds(values):
    """Return (mean, low, high): the mean over runs with its 95% interval by Student's t."""
    mean = fmean(values)
    half = T[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) in T else math.nan
    return mean, mean - half, mean + half


def print_table(corner, columns, rows, width, sign=""):
    """Print rows {name: [(value, low, high)]}, shares as percentages, under the names of the columns."""
    first = max(len(corner), *map(len, rows))
    print(f"\n{corner:{first}}" + "".join(f"  {name:>{width}}" for name in columns))
    for name, row in rows.items():
        signs = [sign or "+" * (" - " in column) for column in columns]
        cells = [cell(*figure, sign=one) for figure, one in zip(row, signs)]
        print(f"{name:{first}}" + "".join(f"  {text:>{width}}" for text in cells))


def ladder(folder, how):
    """Print and return the accuracy after each stage. how: "greedy" or "sampled"."""
    rows = read(folder / f"ladder.{how}.json")
    domains = ["macro", *rows["base"]["domains"]]
    result = {name: {domain: own(row, domain) for domain in domains} for name, row in rows.items()}
    print_table(how, domains, {name: row.values() for name, row in result.items()}, 18)
    return result


def methods(folder, how):
    """Print and return the comparison over seeds of the fine-tuned model, mixed and PCGrad."""
    # of each seed the figures of mixed, PCGrad, rft
    seeds = [read(path).values() for path in sorted(folder.glob(f"seed*.{how}.json"))]
    if not seeds:
        return None
    _, _, tuned = seeds[0]
    result = {}
    for domain in ("macro", *tuned["domains"]):
        mixed, pcgrad, rft = ([own(row, domain)[0] for row in rows] for rows in zip(*seeds))
        paired = [own(row, domain, "difference") for _, row, _ in seeds]
        result[domain] = {
            "rft": own(tuned, domain),
            "mixed": over_seeds(mixed),
            "pcgrad": over_seeds(pcgrad),
            "difference": over_seeds([difference for difference, _, _ in paired]),
            "difference_of_each_seed": paired,
            "gain_of_mixed": over_seeds([b - a for a, b in zip(rft, mixed)]),
        }
    columns = {"rft": "rft", "mixed": "mixed", "PCGrad": "pcgrad", "PCGrad - mixed": "difference",
               "mixed - rft": "gain_of_mixed"}
    rows = {domain: [row[key] for key in columns.values()] for domain, row in result.items()}
    print_table(f"{len(seeds)} seeds, {how}", columns, rows, 26)
    return result


def transfer(folder, how):
    """Print and return {trained on: {tested on: change of accuracy}} of training on a single domain."""
    if not (folder / f"single.{how}.json").exists():
        return None
    rows = read(folder / f"single.{how}.json")
    domains = list(rows["rft"]["domains"])
    result = {name: {domain: own(rows[name.partition(":")[0]], domain, "difference") for domain in domains}
              for name in domains}
    print_table(f"{how}, of", domains, {name: row.values() for name, row in result.items()}, 20, "+")
    return result


def cosines(folder):
    """Return ({pair: {step: mean cosine of gradients}}, {step: mean share of conflicts}) of PCGrad runs."""
    prefix = "surgery/cosine/"
    found = {}                               # {key: {step: values of the runs}}
    for run in sorted(folder.glob("pcgrad*/")):
        for line in read_lines(run):
            for key, value in line.items():
                if key.startswith((prefix, "surgery/conflicts")):
                    found.setdefault(key, {}).setdefault(line["step"], []).append(value)
    means = {key: {step: fmean(values) for step, values in steps.items()} for key, steps in found.items()}
    conflicts = means.pop("surgery/conflicts", {})
    return {key.removeprefix(prefix): row for key, row in means.items()}, conflicts


def cost(folder):
    """Print and return seconds and memory of each grpo.py run."""
    result = {}
    for run in sorted(folder.glob("*/")):
        lines = [line for line in read_lines(run) if "rollout_s" in line]
        if lines:
            last = lines[-1]
            update_s = fmean(line["update_s"] for line in lines)
            result[run.name] = {"steps": last["step"], "seconds": last["seconds"],
                                "peak_memory_gb": last["peak_memory_gb"], "update_s": update_s}
            print(f"{run.name:12} {last['step']:4} steps, {last['seconds']:7.1f} s, {update_s:.2f} s an "
                  f"update, {last['peak_memory_gb']:.2f} GB")
    return result


def main(argv):
    folder = Path(argv[0] if argv else "out/domains")
    if not (folder / "ladder.sampled.json").exists():
        raise BadInput(f"{folder} has no ladder.sampled.json: run runs/domains.sh first, or give its folder.")
    summary = {}
    for how in ("greedy", "sampled"):
        summary[how] = {part.__name__: part(folder, how) for part in (ladder, methods, transfer)}
    found, conflicts = cosines(folder)
    summary |= {"cosines": found, "conflicts": conflicts, "cost": cost(folder)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    guard.run(main)
