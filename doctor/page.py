"""A page of a run, or of a folder of runs: findings, accuracy, curves and the recorded completions, in one
HTML file that needs no server and no network.

    python -m doctor.page out/grpo                           out/grpo/report.html
    python -m doctor.page out/quickstart --change            tokens also shaded by how training changed them
"""
import html
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import hub
from doctor import plot
from doctor.diagnose import Doctor
from rollouts import records
from runtime import checkpoint, config, guard, hardware
from runtime.config import BadInput, PositiveInt
from runtime.log import read_lines
from text.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("page.html")
SIGN = "<!-- nanoRFT's report -->"           # by which an earlier page is known
MOST_CHARACTERS = 4000                       # of a completion that are shown
MOST_POINTS = 400                            # of a curve
SHOWN = ("step split number sample question answer end score parts figures error reward advantage trained "
         "verdict other").split()            # of a record
ACCURACY = ("accuracy", "accuracy_low", "accuracy_high")


@dataclass
class Config:
    folder: str = "."                        # run folder, or a folder of runs; first on the command line
    output: str | None = None                # None: report.html in the folder
    megabytes: PositiveInt = 4               # of samples; steps and questions are left out, evenly
    change: bool = False                     # add each token's log-probability under the best checkpoint


# --- runs ---

def describe(run):
    """Return what the page shows of a run but its samples: a dictionary for JSON."""
    lines = read_lines(run)
    last = {key: value for line in lines for key, value in line.items() if isinstance(value, int | float)}
    place = run.resolve()
    recipes = f"{place.parent.name}_{place.name}", place.name          # quickstart_rft, cpu_small
    recipe = next((name for name in recipes if (plot.SEEDS / f"{name}.json").exists()), None)
    seeds = plot.recorded(recipe) if recipe else {}
    curves = []
    for title, keys, scale in plot.GRPO_PANELS if "reward" in last else plot.PANELS:
        series = [curve(lines, key, seeds) for key in keys]
        if any(one["y"] for one in series):
            curves.append({"title": title, "log": scale == "log", "series": series})
    return {
        "name": run.name,
        "findings": [{"sentence": str(f), "over": f.until is not None} for f in Doctor(lines).findings],
        "last": last,
        "options": {key: value for key, value in config.read_saved(run).items() if value is not None},
        "curves": curves,
    }


def curve(lines, key, seeds):
    """Return a curve's points, evenly thinned, and its bands: the range of recorded seeds, the interval."""
    x, y = plot.points(lines, key)
    thin = slice(None, None, 1 + len(x) // MOST_POINTS)
    bands = []
    if key in seeds:
        runs = list(zip(*seeds[key]["runs"]))
        bands.append({"of": "seeds", "x": seeds[key]["steps"], "low": list(map(min, runs)),
                      "high": list(map(max, runs))})
    low, high = (plot.points(lines, f"{key}_{bound}")[1] for bound in ("low", "high"))
    if len(low) == len(high) == len(x):
        bands.append({"of": "interval", "x": x[thin], "low": low[thin], "high": high[thin]})
    return {"key": key, "x": x[thin], "y": y[thin], "bands": bands}


def accuracies(folder):
    """Return the rows of eval.py --json tables (greedy.txt, sampled.txt ...) in a folder: [{name, rows}]."""
    tables = []
    for path in sorted(folder.glob("*.txt")):
        last_line = path.read_text("utf-8", "replace").rstrip().rpartition("\n")[2]
        try:
            rows = [{"name": Path(row["model"]).name} | {key: row[key] for key in ACCURACY}
                    for row in config.parse_json(last_line, dict)["models"]]
        except (ValueError, LookupError, TypeError):
            continue                         # another text
        tables.append({"name": path.stem, "rows": rows})
    return tables


# --- samples ---

def samples_of(path, most, run, change=False):
    """Return the samples at a path for the page, in at most about `most` bytes, held-out questions first:
    {total, samples, pieces: {id: text}}. run: the folder whose tokenizer they have; change: add their
    log-probabilities under its best checkpoint."""
    scores = {}                              # by doctor.regrade, if that has run
    if records.regraded(path).exists():
        scores = config.read_json(records.regraded(path), "remove it, and repeat doctor.regrade")["scores"]
    sizes = defaultdict(Counter)             # {split: {unit: bytes}}
    total = 0
    for record in records.read(path):        # a long run's records don't fit in memory
        sizes[record.get("split")][unit_of(record)] += size_of(record)
        total += 1
    chosen = {split: thinned(of_split, most // len(sizes)) for split, of_split in sizes.items()}
    kept = [record | {"other": scores.get(records.key_of(record))} for record in records.read(path)
            if unit_of(record) in chosen[record.get("split")]]
    kept.sort(key=lambda record: record.get("split") == "train")
    after = later_logprobs(hub.find(run), kept) if change else {}
    samples = [shown(record, after.get(i)) for i, record in enumerate(kept)]
    tokenizer = Tokenizer.of_run(run, checkpoint.read_model(run)["tokenizer"])
    pieces = {i: tokenizer.decode([i]) for i in {i for sample in samples for i in sample.get("ids", ())}}
    return {"total": total, "samples": samples, "pieces": pieces}


def unit_of(record):
    """Return the step of training, or the number of a question, which is asked again and again, or by
    datagen.py."""
    return record["step" if record.get("split") == "train" else "number"]


def size_of(record):
    """Return about the bytes that a record takes in the page."""
    shown = min(MOST_CHARACTERS, len(record["completion"]))
    return 200 + len(record["question"]) + shown + 8 * len(record["ids"])


def thinned(sizes, most):
    """Return every n-th unit and the last, so that they take about `most` bytes. sizes: {unit: bytes}."""
    units = sorted(sizes)
    return {*units[::1 + sizes.total() // most], units[-1]}


def shown(record, after):
    """Return a record as the page has it. after: the logprobs under the best checkpoint, or None."""
    text = record["completion"]
    kept = {key: record.get(key) for key in SHOWN} | {"text": text[:MOST_CHARACTERS]}
    if len(text) > MOST_CHARACTERS:
        kept["more"] = len(text) - MOST_CHARACTERS
    else:
        kept["ids"] = record["ids"]
        kept["nats"] = [round(value, 2) for value in record["logprobs"]]
        kept["after"] = after and [round(value, 2) for value in after]
    if "turns" in record:
        kept["turns"] = [turn[:MOST_CHARACTERS] for turn in record["turns"]]
    return {key: value for key, value in kept.items() if value is not None}


def later_logprobs(source, kept):
    """Return {index of a record of training: logprobs of its ids under a ModelSource}."""
    from rollouts.batch import MICRO_BATCH_ON_CPU, logprobs_of
    from rollouts.pipeline import Completion
    hw = hardware.setup(compile=False)
    model = source.load(device=hw.device)
    temperature = config.read_saved(source.folder).get("temperature", 1.0)
    completions = [Completion(record["prompt"], record["ids"], record["logprobs"], True, key=i,
                              forced=record.get("forced", []))
                   for i, record in enumerate(kept) if "prompt" in record]
    return {c.key: after for c, after in logprobs_of(model, hw, completions, MICRO_BATCH_ON_CPU, temperature)}


# --- the page ---

def render(title, data):
    """Return the page's HTML. Completions come into it as JSON alone, without `<`, and its script shows them
    as text, so that nothing in them is executed."""
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8").replace("SIGN", SIGN, 1)
    return template.replace("DATA", content, 1).replace("TITLE", html.escape(title), 1)


def main(argv):
    cfg = config.load(Config, argv, positional="folder")
    folder = Path(cfg.folder)
    models = [*folder.glob("model.json")] or folder.glob("*/model.json")
    runs = [path.parent for path in sorted(models, key=lambda path: path.stat().st_mtime)]     # as they began
    if not runs:
        raise BadInput(f"{folder} holds no run (a folder with model.json): give the out_dir of a run.")
    output = Path(cfg.output or folder / "report.html")
    if not output.parent.is_dir():
        raise BadInput(f"There is no folder {output.parent} for --output={output}: create it, or choose "
                       "another.")
    if output.exists() and (not output.is_file() or SIGN not in output.read_text("utf-8", "replace")[:200]):
        raise config.would_overwrite(output, "a page of doctor.page")
    logs = sorted(folder.glob("*.attempts.jsonl")) if folder not in runs else []
    most = cfg.megabytes * records.MEGABYTE // (len(runs) + len(logs))
    described = [describe(run) | samples_of(run, most, run, cfg.change) for run in runs]
    tables = accuracies(folder)
    evaluated = [{"name": run["name"]} | {key: run["last"][f"val_{key}"] for key in ACCURACY}
                 for run in described if "val_accuracy" in run["last"]]
    if evaluated:
        tables.append({"name": "last evaluation in training, greedy", "rows": evaluated})
    described[1:1] = [{"name": f"{log.name.removesuffix('.attempts.jsonl')}, rejection sampling"}
                      | samples_of(log, most, runs[0]) for log in logs]
    output.write_text(render(str(folder), {"runs": described, "tables": tables}), encoding="utf-8")
    print(output)
    return 0


if __name__ == "__main__":
    guard.run(main)
