"""A page of a run, or of a folder of runs: findings, accuracy, curves and the recorded completions, in one
HTML file that needs no server and no network.

    python -m doctor.page out/grpo                           out/grpo/report.html
    python -m doctor.page out/quickstart --change            tokens also shaded by how training changed them

Options, as --key=value:
"""
import json
from dataclasses import dataclass
from pathlib import Path

import hub
from doctor import plot
from doctor.diagnose import Doctor
from rollouts import records
from runtime import checkpoint, config, guard, hardware
from runtime.config import BadInput, PositiveInt
from runtime.metrics import read_lines
from text.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("page.html")
SIGN = "<!-- nanoRFT's report -->"           # by which an earlier page is known
MOST_CHARACTERS = 4000                       # of a completion that are shown
MOST_POINTS = 400                            # of a curve
SHOWN = ("step split number sample question answer end score parts figures error reward advantage trained "
         "verdict model other").split()      # of a record


@dataclass
class Config:
    folder: str = ""                         # run folder, or a folder of runs; first on the command line
    output: str | None = None                # None: report.html in the folder
    megabytes: PositiveInt = 4               # of samples, at most; steps are left out, evenly
    change: bool = False                     # add each token's log-probability under the best checkpoint


# --- runs ---

def runs_of(folder):
    """Return the run folders at or in a folder, in the order in which they began."""
    models = [*folder.glob("model.json")] or folder.glob("*/model.json")
    return [path.parent for path in sorted(models, key=lambda path: path.stat().st_mtime)]


def describe(run, expected):
    """Return what the page shows of a run but its samples: a dictionary for JSON."""
    lines = read_lines(run)
    doctor = Doctor(lines)
    options = config.read_saved(run)
    last = {}                                # the latest figures of each kind
    for line in lines:
        last |= {key: value for key, value in line.items() if isinstance(value, int | float)}
    panels = plot.GRPO_PANELS if any("reward" in line for line in lines) else plot.PANELS
    seeds = plot.recorded(expected) if expected else {}
    curves = []
    for title, keys, scale in panels:
        series = [curve(lines, key, seeds.get(key)) for key in keys]
        if any(one["y"] for one in series):
            curves.append({"title": title, "log": scale == "log", "series": series})
    return {
        "name": run.name,
        "findings": [{"sentence": str(f), "over": f.until is not None} for f in doctor.findings],
        "steps": last.get("step", 0),
        "last": last,
        "options": {key: value for key, value in options.items() if value is not None},
        "curves": curves,
    }


def curve(lines, key, seeds=None):
    """Return a curve's points, evenly thinned, with its interval or the range of recorded seeds."""
    x, y = plot.points(lines, key)
    thin = slice(None, None, -(-len(x) // MOST_POINTS) or 1)
    result = {"key": key, "x": x[thin], "y": [round(value, 5) for value in y[thin]]}
    for bound in ("low", "high"):
        values = plot.points(lines, f"{key}_{bound}")[1]
        if len(values) == len(y):
            result[bound] = values[thin]
    if seeds:
        runs = list(zip(*seeds["runs"]))
        result["seeds"] = {"x": seeds["steps"], "low": list(map(min, runs)), "high": list(map(max, runs))}
    return result


def accuracies(folder):
    """Return the rows of eval.py --json tables (greedy.txt, sampled.txt ...) in a folder: [{table, rows}]."""
    tables = []
    for path in sorted(folder.glob("*.txt")):
        lines = path.read_text("utf-8", "replace").strip().splitlines()
        try:
            models = config.parse_json(lines[-1] if lines else "", dict)["models"]
            rows = [{"name": Path(row["model"]).name, **{key: row[key] for key in
                     ("accuracy", "accuracy_low", "accuracy_high")}} for row in models]
        except (ValueError, LookupError, TypeError):
            continue                         # another text
        tables.append({"name": path.stem, "rows": rows})
    return tables


# --- samples ---

def read_all(path):
    """Return the records at a path, each with `other`, its score by doctor.regrade if that has run."""
    kept = list(records.read(path))
    regraded = records.regraded(path)
    if regraded.exists():
        scores = config.read_json(regraded, "remove it, and repeat doctor.regrade")["scores"]
        for record in kept:
            record["other"] = scores.get(records.key_of(record))
    return kept


def thinned(kept, most):
    """Return as many records as take `most` bytes in the page. Of held-out questions, which are asked again
    and again, and of datagen.py's questions every n-th is kept; of training, whole steps: the first, the last
    and evenly spaced others."""
    asked = [record for record in kept if record.get("split") != "train"]
    trained = [record for record in kept if record.get("split") == "train"]
    share = 1 + sum(map(cost, asked)) // (most // 3 if trained else most)
    asked = [record for record in asked if record["number"] % share == 0]
    most -= sum(map(cost, asked))
    steps = sorted({record["step"] for record in trained})
    n = max(1, len(steps) * most // max(most, sum(map(cost, trained))))
    chosen = {steps[i * (len(steps) - 1) // max(1, n - 1)] for i in range(n)} if steps else ()
    return asked + [record for record in trained if record["step"] in chosen]


def cost(record):
    """Return about how many bytes a record takes in the page."""
    text = len(record["question"]) + min(MOST_CHARACTERS, len(record["completion"]))
    return 200 + text + 8 * len(record["ids"])


def shown(record, after):
    """Return a record as the page has it. after: the logprobs under the best checkpoint, or None."""
    kept = {key: record.get(key) for key in SHOWN}
    text = record["completion"]
    kept["text"] = text[:MOST_CHARACTERS]
    if len(text) > MOST_CHARACTERS:
        kept["more"] = len(text) - MOST_CHARACTERS
    elif record.get("logprobs"):
        kept["ids"] = record["ids"]
        kept["nats"] = [round(value, 2) for value in record["logprobs"]]
        if after:
            kept["after"] = [round(value, 2) for value in after]
    if record.get("turns"):
        kept["turns"] = [turn[:MOST_CHARACTERS] for turn in record["turns"]]
    return {key: value for key, value in kept.items() if value is not None}


def samples_of(path, most, run, change=False):
    """Return the samples at a path for the page: {total, samples, pieces: {id: text}}. run: the folder whose
    tokenizer they have; change: add their log-probabilities under its best checkpoint."""
    every = read_all(path)
    kept = thinned(every, most)
    after = later_logprobs(hub.find(run), kept) if change else {}
    samples = [shown(record, after.get(i)) for i, record in enumerate(kept)]
    tokenizer = Tokenizer.of_run(run, checkpoint.read_model(run)["tokenizer"])
    pieces = {i: tokenizer.decode([i]) for i in {i for sample in samples for i in sample.get("ids", ())}}
    return {"total": len(every), "samples": samples, "pieces": pieces}


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
    html = TEMPLATE.read_text(encoding="utf-8").replace("SIGN", SIGN, 1)
    title = title.replace("&", "&amp;").replace("<", "&lt;")
    return html.replace("DATA", content, 1).replace("TITLE", title, 1)


def page_of(cfg):
    """Return the path of the page that was written."""
    folder = Path(cfg.folder)
    runs = runs_of(folder)
    if not runs:
        raise BadInput(f"{folder} holds no run (a folder with model.json): give the out_dir of a run.")
    output = Path(cfg.output or folder / "report.html")
    if output.exists() and SIGN not in output.read_text("utf-8", "replace")[:200]:
        raise config.would_overwrite(output, "a page of doctor.page")
    logs = sorted(folder.glob("*.attempts.jsonl")) if folder not in runs else []
    most = cfg.megabytes * records.MEGABYTE // max(1, len(runs) + len(logs))
    described = []
    for run in runs:
        expected = f"{folder.name}_{run.name}"
        names = {path.stem for path in plot.SEEDS.glob("*.json")}
        about = describe(run, expected if expected in names else None)
        described.append(about | samples_of(run, most, run, cfg.change))
    for log in logs:
        name = f"{log.name.removesuffix('.attempts.jsonl')}, rejection sampling"
        described.insert(1, {"name": name, "findings": []} | samples_of(log, most, runs[0]))
    html = render(str(folder), {"runs": described, "tables": accuracies(folder)})
    output.write_text(html, encoding="utf-8")
    return output


def main(argv):
    cfg = config.load(Config, argv, positional="folder")
    if not cfg.folder:
        raise BadInput("No run is given: name a run folder, such as python -m doctor.page out/grpo.")
    print(page_of(cfg))
    return 0


if __name__ == "__main__":
    guard.run(main)
