"""Make the Markdown table of a run of measure.gpu.run from its gpu.jsonl."""
from collections import Counter

# {figure: its format}
SHOWN = {
    "tokens_per_s": "{:,.0f} tokens/s",
    "completions_per_s": "{:,.1f} completions/s",
    "mfu": "MFU {:.1%}",
    "of_limit": "{:.0%} of the limit",
    "mbu": "MBU {:.0%}",
    "tflops": "{:,.1f} TFLOP/s",
    "gb_per_s": "{:,.0f} GB/s",
    "of_nominal": "{:.0%} of nominal",
    "ms": "{:.2f} ms",
    "varied_ms": "{:.2f} at varied lengths",
    "first_call_s": "first call {:.3f} s",
    "step_ms": "a step {:,.2f} ms",
    "floor_ms": "at least {:,.2f}",
    "host_share": "host {:.0%}",
    "rollout_s": "rollout {:.3f} s",
    "update_s": "update {:.3f} s",
    "peak_memory_gb": "{:.2f} GiB",
    "utilization": "busy {:.0%}",
    "speedup": "{:.2f} times {beside}",
    "longer_outside_s": "{:+.1f} s for start and compiling",
    "loss_off": "loss off by {:.2%}",
    "over_generate": "{:.1f} times transformers' generate",
}


def shown(figures):
    """Return the text of a check's figures."""
    known = {key: figures[key] for key in SHOWN if figures.get(key) is not None}
    texts = [SHOWN[key].format(value, beside=figures.get("beside")) for key, value in known.items()]
    texts += [f"{name[:40]} {share:.0%}" for name, share in list(figures.get("consumers", {}).items())[:4]]
    return ", ".join(texts)


def table(lines):
    """Return the table of a run: a line about the card, then a row for each check. Tests have one row of
    counts for each stage, and failed tests a row of their own."""
    rows = []
    if lines[0]["stage"] == "card":
        rows = [heading(lines[0]), ""]
        lines = lines[1:]
    rows += ["| stage | check | result | s | by |", "|---|---|---|---|---|"]
    by_stage = {}
    for line in lines:
        by_stage.setdefault(line["stage"], []).append(line)
    for stage, checks in by_stage.items():
        command = f"`{checks[0]['command']}`"
        if any("::" in line["name"] for line in checks):
            rows.append(row_of_tests(stage, checks, command))
            checks = [line for line in checks if line["status"] in ("failed", "timeout")]
            command = ""
        for line in checks:
            result = shown(line["figures"])
            if line["status"] != "ok":
                result = ", ".join(filter(None, (f"**{line['status']}**: {line['error']}", result)))
            seconds = "" if line["seconds"] is None else f"{line['seconds']:.0f}"
            rows.append(row(stage, line["name"].rpartition("::")[2], result, seconds, command))
            command = ""                     # only in the stage's first row
    return "\n".join(rows)


def row(*cells):
    cells = [" ".join(text.replace("|", "/").split())[:400] for text in cells]
    return f"| {' | '.join(cells)} |"


def row_of_tests(stage, checks, command):
    """Return the row that counts the tests of a stage."""
    counts = Counter(line["status"] for line in checks)
    result = ", ".join(f"{n} {status}" for status, n in counts.items())
    # a stage that timed out has the total on a line of its own
    seconds = max([sum(line["seconds"] or 0 for line in checks if "::" in line["name"]),
                   *(line["seconds"] or 0 for line in checks if "::" not in line["name"])])
    return row(stage, "tests", result, f"{seconds:.0f}", command)


def heading(card):
    """Return the sentence about the hardware and versions above a table."""
    if card["status"] != "ok":
        return f"The card is unknown: {card['status']}, {card['error']}."
    about = card["figures"]
    hardware = [f"{max(1, about['cards'])} × {card['name']}", f"{about['memory_gb']} GiB"]
    if about["nominal"]:
        hardware.append(f"nominal {about['nominal'][about['dtype']]:g} TFLOP/s in {about['dtype']}")
        hardware.append(f"{about['nominal_tb_per_s']:g} TB/s")
    if about["power_limit"]:
        hardware.append(about["power_limit"])
    versions = [f"{name} {about[name]}" for name in ("driver", "torch", "cuda", "cudnn") if about[name]]
    return f"{', '.join(hardware)}; {', '.join(versions)}; {about['date'][:10]}, commit {about['commit']}."
