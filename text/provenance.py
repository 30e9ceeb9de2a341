"""Records a run's task file and prompt template in model.json, and checks the task file on resume."""
from pathlib import Path

from runtime import checkpoint
from runtime.config import BadInput
from text import examples


def own_task(cfg):
    """Return {file, sha256} of the user's task file that a run executes (joined for the files of a mixture),
    or None."""
    kind, _, name = ("task:" + cfg.task if hasattr(cfg, "task") else cfg.dataset).partition(":")
    if kind not in ("task", "examples"):
        return None
    import tasks
    try:
        files = tasks.user_files(name)
        digests = [checkpoint.sha256(file) for file in files]
    except (OSError, ValueError):                             # raised again by loading the task
        return None
    return {"file": ", ".join(files), "sha256": " ".join(digests)} if files else None


def prompt_form(cfg):
    """Return the prompt template of a run of train.py, with {} for the question; None if it has none, or
    several."""
    try:
        kind, _, name = cfg.dataset.partition(":")
        if kind in ("task", "examples"):
            import tasks
            return cfg.prompt or common_prompt(tasks.load(name))
    except (LookupError, OSError, ValueError):                # raised again where it is needed
        return None
    if not examples.is_examples_file(cfg.dataset, cfg.text_key):
        return None
    return cfg.prompt or examples.read_form(cfg.dataset)


def common_prompt(task):
    """Return the prompt template of a task; None for a mixture of tasks with several."""
    try:
        return task.prompt
    except ValueError:
        return None


def check_task(cfg, argv):
    """Print which user's task file a resumed run executes. BadInput if it has changed since the run recorded
    it, unless the command line names it."""
    # A run without a checkpoint starts anew, and its init_from is no longer "resume".
    asked = cfg.resume == "auto" or "--init_from=resume" in argv
    resumes = cfg.init_from == "resume" or asked and (Path(cfg.out_dir) / "config.json").exists()
    found = own_task(cfg) if resumes else None
    if not found:
        return
    recorded = checkpoint.read_model(cfg.out_dir).get("task")
    file = found["file"]
    option = "--task=" if hasattr(cfg, "task") else f"--dataset={cfg.dataset.partition(':')[0]}:"
    about = "unchanged since the run recorded it"
    if not isinstance(recorded, dict) or recorded.get("sha256") != found["sha256"]:
        about = f"changed since the run recorded it, because {option} names it"
        if not any(arg.startswith(option) for arg in argv):
            raise BadInput(f"{file} has changed since the run in {cfg.out_dir} recorded it: restore it, "
                           f"accept the new one with {option}{file}, or start a new run with --init_from=.")
    print(f"Executing {file}, {about}.", flush=True)
