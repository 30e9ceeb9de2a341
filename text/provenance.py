"""What a run notes of the task file and the prompt that it was trained with, and the check on resume."""
from pathlib import Path

import tasks
from runtime import checkpoint
from runtime.config import BadInput
from text import examples


def provenance(cfg):
    """Return the entries of model.json about the task file and the form of the prompt."""
    return {"task": own_task(cfg), "prompt": prompt_form(cfg)}


def own_task(cfg):
    """Give {file, sha256} of the task file of one's own that a run executes (of a mixture's several, their names
    and digests in a row), None without."""
    kind, _, name = ("task:" + cfg.task if hasattr(cfg, "task") else cfg.dataset).partition(":")
    try:
        files = tasks.user_files(name) if kind == "task" else []
        digests = [checkpoint.sha256(file) for file in files]
    except (OSError, ValueError):                             # loading the task will say so
        return None
    return {"file": ", ".join(files), "sha256": " ".join(digests)} if files else None


def prompt_form(cfg):
    """Return the form in which a run puts questions to the model, with {} for the question; None if it has
    none, or several."""
    try:
        if hasattr(cfg, "task"):
            return tasks.load(cfg.task).prompt
        if cfg.dataset.startswith("task:"):
            return tasks.load(cfg.dataset.removeprefix("task:")).prompt
    except (LookupError, OSError, ValueError):                # which will be said by who needs it
        return None
    if Path(cfg.dataset).suffix.lower() != ".json":
        return None
    return cfg.prompt or examples.read_form(cfg.dataset)


def check_task(cfg, argv):
    """Say which task file of one's own a resumed run is about to execute. BadInput if it is not as the run
    noted it, unless the command line names it."""
    # Without a checkpoint the run begins again, and its init_from is no longer "resume".
    asked = cfg.resume == "auto" or "--init_from=resume" in argv
    goes_on = cfg.init_from == "resume" or asked and (Path(cfg.out_dir) / "config.json").exists()
    found = own_task(cfg) if goes_on else None
    if not found:
        return
    model, file = checkpoint.read_model(cfg.out_dir), found["file"]
    about, knob = "as the run noted it", "--task=" if hasattr(cfg, "task") else "--dataset=task:"
    if "task" not in model:
        about = "of which the run noted no digest"
    elif not isinstance(model["task"], dict) or model["task"].get("sha256") != found["sha256"]:
        about = f"not as the run noted it, because {knob} names it"
        if not any(arg.startswith(knob) for arg in argv):
            raise BadInput(f"{file} is not the task file that the run in {cfg.out_dir} noted: put that back, "
                           f"name the new one with {knob}{file}, or start a new run with --init_from=.")
    print(f"Executing {file}, {about}.", flush=True)
