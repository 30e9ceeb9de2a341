"""Atomic checkpoints and the rest of a run folder.

    out/run/config.json               all options, resolved
            model.json                architecture, tokenizer, prompt template; with any checkpoint it makes
                                      the model
            tokenizer.json            for a Hugging Face tokenizer
            base.safetensors          with LoRA: the initial weights (checkpoints then hold the trained ones
                                      alone); for grpo.py with a KL term: the reference model. base.sha256:
                                      its digest
            run.lock                  while a process writes here
            rollouts/                 grpo.py: records of all completions, see rollouts/records.py
            metrics.jsonl training.log
            bad_batch_step_5_rank_0.pt                    last batch of a run that diverged
            tensorboard/ wandb/ wandb_id                  with --tensorboard, --wandb
            retry.json                after a failed step: changed settings for the resume
            checkpoints/step_00000100/model.safetensors   weights
                                      optimizer.safetensors   optimizer state of each weight
                                      state.json          rest of the training state (save_only_model omits
                                                          both)
                                      meta.json           step, validation loss, config, SHA-256 of the files
"""
import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import socket
import stat
import struct
import sys
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from layers.lora import EXTRAS, adapters
from runtime import distributed, lock
from runtime.config import LARGEST, BadInput, parse_json, read_sealed, seal
from runtime.progress import ProgressLine
from runtime.usage import one_line

# A folder with these two files is a run. They are replaced atomically, so that they are never missing.
IDENTITY_FILES = ("model.json", "config.json")
ATOMIC_FILES = (*IDENTITY_FILES, "metrics.jsonl", "tokenizer.json", "base.sha256", "retry.json")
# Left by a writer that was killed; the next start removes them.
TEMPORARY_FILES = tuple(f"{name}.tmp-[0-9]*" for name in ATOMIC_FILES)
STALE_FILES = (*TEMPORARY_FILES, "rollouts/*.tmp-[0-9]*", "base.partial*", "checkpoints/partial*",
               "checkpoints/step_" + 8 * "[0-9]" + ".replaced")
# Everything that a run writes into its folder, except wandb's own folder. --overwrite removes only these.
RUN_FILES = (*IDENTITY_FILES, lock.NAME, "metrics.jsonl", "training.log", "tokenizer.json",
             "base.safetensors", "base.sha256", "retry.json", "wandb_id", "bad_batch_step_*_rank_*.pt",
             "checkpoints/step_" + 8 * "[0-9]", "tensorboard/events.out.tfevents.*", "rollouts/*.jsonl.gz",
             "regrade.json", *STALE_FILES)

SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
               torch.int64: "I64"}


# --- atomic files ---

def fsync(path):
    """Flush a file, or a folder's directory entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path, content):
    """Replace a file by `content` (bytes); after a crash it holds either the old or the new content."""
    temporary = Path(f"{path}.tmp-{os.getpid()}")             # another process may write the same file
    try:
        temporary.write_bytes(content)
        fsync(temporary)
        temporary.rename(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(e.errno, e.strerror, str(path)) from None        # ENOSPC comes without a file name
    fsync(Path(path).parent)


def is_full(error):
    """Return whether an exception reports a full disk or quota."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


def write_error(subject, error, remedy):
    """Return the BadInput for a failed write of `subject`. remedy: the action after the cause is fixed."""
    reason = getattr(error, "strerror", None) or error
    advice = "free some space" if is_full(error) else "fix that"
    return BadInput(f"{subject} could not be written ({reason}): {advice}, and {remedy}.")


def new_run(out_dir):
    """Return the advice to begin again with the weights of a run that can't resume."""
    return f"start a new run with --init_from={shlex.quote(str(out_dir))} and another --out_dir="


def inside(folder, name):
    """Return folder / name; BadInput if a name from a downloaded file leads out of the folder (links may)."""
    path = Path(name) if isinstance(name, str) and "\0" not in name else None
    if not path or not path.name or path.is_absolute() or ".." in path.parts:
        raise BadInput(f"{folder} names a file {str(name)[:80]!r}, which is not inside it: get it again.")
    return Path(folder) / name


def sha256(path):
    with open(path, "rb") as f, ProgressLine(f"checking {path}"):
        if hasattr(hashlib, "file_digest"):                   # from Python 3.11 on
            return hashlib.file_digest(f, "sha256").hexdigest()
        return hashlib.sha256(f.read()).hexdigest()


def write_tensors(path, tensors, values):
    """Write a safetensors file. tensors: {name: tensor}, for names, dtypes and shapes only. values: an
    iterator over their contents, one in memory at a time, unlike safetensors' save_file."""
    header = {}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)                     # align the data to 8 bytes
    with open(path, "wb") as file, ProgressLine(f"writing {path.name}", end, "B") as line:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _ in header:
            value = next(values)
            line.add(file.write(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            del value                        # free it before the next one is gathered


# --- checkpoints ---

def step_folder(out_dir, step):
    return Path(out_dir) / "checkpoints" / f"step_{step:08d}"


def save(out_dir, step, weights, state=None, moments=None, val_loss=None, config=None, values=None):
    """Write the checkpoint of `step`, then delete all but the newest config["keep_last"] (2 without a config)
    and the one with the lowest validation loss.

    weights: {name: tensor}. state: a JSON-serializable dictionary, and moments: {name: tensor} of the
    optimizers; both are needed to resume. values: iterator over the unsharded contents of weights and
    moments, in this order; needed if they are sharded. Files are written under a temporary name, flushed and
    renamed, so that a full disk leaves earlier checkpoints intact, even one of the same step.
    """
    moments = moments or {}
    values = values or iter([*weights.values(), *moments.values()])
    folder = Path(out_dir) / "checkpoints"
    final = step_folder(out_dir, step)
    replaced = Path(f"{final}.replaced")      # a step may be saved before and after its evaluation
    partial = folder / f"partial-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_tensors(partial / "model.safetensors", weights, values)
        if state is not None:
            write_tensors(partial / "optimizer.safetensors", moments, values)
            (partial / "state.json").write_text(json.dumps(state, indent=1))
        files = sorted(path.name for path in partial.iterdir())
        for name in files:
            fsync(partial / name)
        digests = {name: sha256(partial / name) for name in files}
        meta = {"step": step, "val_loss": val_loss, "config": config, "sha256": digests}
        write_atomically(partial / "meta.json", seal(meta))
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)            # `tidy` restores it if this process dies here
        partial.rename(final)
        fsync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        again = "resume with --init_from=resume" if state else new_run(out_dir)
        raise write_error(f"The checkpoint of step {step} in {folder}", e,
                          f"{again}; earlier checkpoints are intact") from None
    keep_last = (config or {}).get("keep_last", 2)
    kept = [*[other for other in steps(out_dir) if other <= step][-keep_last:], best(out_dir, step)]
    for other in steps(out_dir):              # later steps were damaged or rolled back
        if other not in kept:
            shutil.rmtree(step_folder(out_dir, other), ignore_errors=True)


def steps(out_dir):
    """Return the steps that have a checkpoint, sorted."""
    folders = Path(out_dir, "checkpoints").glob("step_*")
    matches = [re.fullmatch(r"step_(\d{8,})", folder.name) for folder in folders]
    return sorted(int(match[1]) for match in matches if match)


def read_meta(out_dir, step):
    """Return the meta.json of a checkpoint; {} if it is unreadable or not as `save` wrote it."""
    try:
        meta = read_sealed(step_folder(out_dir, step) / "meta.json", "restore it")
    except BadInput:
        return {}
    digests = meta.get("sha256")
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        return {}
    loss = meta.get("val_loss")
    return meta if loss is None or type(loss) is float or type(loss) is int and abs(loss) <= LARGEST else {}


def losses(out_dir, last=math.inf):
    """Return {step: validation loss} of the checkpoints up to step `last` that have a finite one."""
    recorded = {step: read_meta(out_dir, step).get("val_loss") for step in steps(out_dir) if step <= last}
    return {step: loss for step, loss in recorded.items() if loss is not None and math.isfinite(loss)}


def best(out_dir, last=math.inf):
    """Return the checkpointed step with the lowest validation loss up to step `last`; None if none was
    evaluated."""
    evaluated = losses(out_dir, last)
    return min(evaluated, key=evaluated.get, default=None)


def damage(out_dir, step):
    """Return None if every file of the checkpoint matches its digest, else a description of the problem."""
    folder = step_folder(out_dir, step)
    expected = read_meta(out_dir, step).get("sha256")
    if not expected:
        return "meta.json is missing or unreadable"
    for name, digest in expected.items():
        if Path(name).name != name:
            return f"meta.json names {name}, which is not a file in its folder"
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            if sha256(folder / name) != digest:
                return f"{name} fails its checksum"
        except OSError as e:
            return f"{name} can't be read: {e.strerror}"
    return None


def newest_intact(out_dir, log=print):
    """Return the newest step with an intact checkpoint, None if there is none. log: prints a line for each
    damaged one."""
    for step in reversed(steps(out_dir)):
        problem = damage(out_dir, step)
        if problem is None:
            return step
        log(f"The checkpoint of step {step} in {out_dir} is damaged ({problem}): trying the previous one.")
    return None


@contextlib.contextmanager
def loading(subject):
    """Turn errors from files without weights, or with another model's, into BadInput. subject: the files and
    their folder, for the message."""
    try:
        with ProgressLine(f"loading {subject[0].lower()}{subject[1:]}"):
            yield
    except torch.OutOfMemoryError:           # a RuntimeError, but not an error of the files
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as e:
        if "allocate memory" in str(e):      # a plain RuntimeError on a CPU
            raise
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise BadInput(f"{subject} can't be loaded ({reason}): restore the original files of one model, or "
                       "choose another.") from None


def weights_of(model):
    """Return {name: tensor} of the weights in a checkpoint: all; with adapters, whose run has the frozen
    parameters in base.safetensors, all others."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad} if adapters(model) else ()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def base_of(model):
    """Return {name: tensor} of a model without adapters and extras."""
    left_out = adapters(model)
    return {name: tensor for name, tensor in model.state_dict().items()
            if name not in left_out and not name.startswith(EXTRAS)}


def load_weights(out_dir, step):
    """Return the weights of a checkpoint, {name: tensor}. Those of GPT.extras are left out, and standard
    error names them."""
    weights = load_file(step_folder(out_dir, step) / "model.safetensors")
    extras = [name for name in weights if name.startswith(EXTRAS)]
    if extras:
        say_once(f"{', '.join(extras)} in {out_dir}: left aside, since only the script that trained this has "
                 "a use for it.")
    return {name: weights[name] for name in weights if name not in extras}


def say_once(sentence):
    """Print a sentence on standard error, on one rank only."""
    if distributed.is_first_to_say(sentence):
        print(one_line(sentence), file=sys.stderr, flush=True)


def save_base(out_dir, weights, values=None):
    """Write the weights that a run started from, once for all its checkpoints. values: see save."""
    partial = Path(out_dir) / f"base.partial-{os.getpid()}"
    final = Path(out_dir) / "base.safetensors"
    try:
        write_tensors(partial, weights, values or iter(weights.values()))
        fsync(partial)
        partial.rename(final)
        write_atomically(Path(out_dir) / "base.sha256", sha256(final).encode())
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise write_error(final, e, "start again with --overwrite") from None


def load_base(out_dir, device="cpu"):
    """Return the weights that save_base wrote, {name: tensor}; BadInput if the file is damaged."""
    file = Path(out_dir) / "base.safetensors"
    if not file.exists():
        raise BadInput(f"There is no {file}: leave --beta out if the run began without it, or restore "
                       "the file.")
    try:
        problem = sha256(file) != file.with_suffix(".sha256").read_text() and "it fails its checksum"
    except (OSError, ValueError) as e:
        problem = getattr(e, "strerror", None) or e
    if problem:
        raise BadInput(f"{file}, the weights that the run started from, can't be used ({problem}): start the "
                       "run again with --overwrite.")
    return load_file(file, device=str(device))


@contextlib.contextmanager
def open_tensors(out_dir, step, name="model.safetensors"):
    """Open a file of a checkpoint and yield {name: lazily read slice}."""
    with safe_open(step_folder(out_dir, step) / name, framework="pt") as file:
        yield {key: file.get_slice(key) for key in file.keys()}


def load_state(out_dir, step):
    """Return the state that `save` was given."""
    return parse_json((step_folder(out_dir, step) / "state.json").read_bytes(), dict)


def has_state(out_dir, step):
    """Return whether training can resume from the checkpoint; without a state it only has weights."""
    return "state.json" in read_meta(out_dir, step).get("sha256", {})


# --- run folders ---

def read_model(out_dir):
    """Return the model.json of a run: architecture, tokenizer, prompt template."""
    return read_sealed(Path(out_dir) / "model.json", "restore it, or give the out_dir of another run")


def choose(out_dir):
    """Return the step whose weights represent the run: of the intact checkpoints the one with the lowest
    validation loss, without any evaluated one the newest. Standard error names each damaged checkpoint that
    might have been chosen instead. BadInput if none is intact."""
    every = steps(out_dir)
    evaluated = losses(out_dir)
    # A checkpoint without a readable meta.json may have been the best.
    problems = {step: damage(out_dir, step) for step in every if not read_meta(out_dir, step)}
    for step in sorted(every, key=lambda step: (evaluated.get(step, math.inf), -step)):
        problems[step] = damage(out_dir, step)
        if problems[step] is None:
            break
    else:
        newest = f" (step {every[-1]}: {problems[every[-1]]})" if every else ""
        raise BadInput(f"{out_dir} has no intact checkpoint{newest}: give another run, or wait until this "
                       "one saves.")
    for other, problem in problems.items():
        sentence = f"The checkpoint of step {other} in {out_dir} is damaged ({problem}): using step {step}."
        # A running run may have deleted it meanwhile.
        if problem and step_folder(out_dir, other).is_dir():
            say_once(sentence)
    return step


def is_run(folder):
    """Return whether a folder has the model.json and config.json of a run; a run that was killed as it
    started may have only the first."""
    folder = Path(folder)

    def has_keys(name, *keys):
        return {*keys} <= parse_json((folder / name).read_bytes(), dict).keys()
    try:
        killed = not (folder / "config.json").exists()
        if not has_keys("model.json", "architecture", "tokenizer"):
            return False
        return killed or has_keys("config.json", "out_dir")
    except (OSError, ValueError):
        return False


def check_kinds(out_dir):
    """Raise BadInput if a run file is a link, which would redirect writes and deletions, or a FIFO, which
    would block: a folder may come from a stranger."""
    is_folder = {pattern.partition("/")[0]: "/" in pattern for pattern in RUN_FILES}
    for path in sorted(Path(out_dir).iterdir()) if Path(out_dir).is_dir() else ():
        for name in is_folder:
            kind, has_kind = ("folder", stat.S_ISDIR) if is_folder[name] else ("regular file", stat.S_ISREG)
            if fnmatch(path.name, name) and not has_kind(path.lstat().st_mode):
                raise BadInput(f"{path} is not a {kind}, and a run would write to it: move it elsewhere, or "
                               "choose another --out_dir=.")


def check_replaceable(out_dir, overwrite):
    """Raise BadInput if a folder holds a run that may not be replaced, or other files with a run's names."""
    folder = Path(out_dir)
    if not is_run(folder):
        foreign = set()
        for pattern in set(RUN_FILES) - set(TEMPORARY_FILES):  # a run killed at its first write leaves those
            foreign |= {path.name for path in folder.glob(pattern.partition("/")[0])}
        foreign.discard(lock.NAME)            # lock.take checks it
        if foreign:
            raise BadInput(f"{out_dir} is not a run folder, but holds {', '.join(sorted(foreign))}, which a "
                           "run would overwrite: move it elsewhere, or choose another --out_dir= "
                           "(--overwrite replaces only runs).")
    elif ((folder / "metrics.jsonl").exists() or steps(out_dir)) and not overwrite:
        raise BadInput(f"{out_dir} already holds a run: resume it with --init_from=resume, replace it with "
                       "--overwrite, or choose another --out_dir=.")


def remove(out_dir, patterns):
    """Delete a run's files with these names, and folders inside checkpoints/."""
    for pattern in patterns:
        for path in list(Path(out_dir).glob(pattern)):
            if pattern.startswith("checkpoints/") and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def open_run(out_dir, config, model, overwrite=False, resume=False):
    """Lock a run folder and write its config.json and model.json. BadInput if it holds a run (metrics or
    checkpoints), unless that is overwritten or resumed, or other files with a run's names."""
    folder = Path(out_dir)
    try:
        check_kinds(out_dir)
        if (folder / lock.NAME).exists():
            lock.take(folder / lock.NAME, out_dir)            # never replace a run that is active
        if not resume:
            check_replaceable(out_dir, overwrite)             # before this run writes anything
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(folder / lock.NAME, out_dir)
        if not resume:
            check_replaceable(out_dir, overwrite)             # another run may have started there meanwhile
            remove(out_dir, [name for name in RUN_FILES if name not in (*IDENTITY_FILES, lock.NAME)])
        write_atomically(folder / "model.json", seal(model))
        write_atomically(folder / "config.json", seal(config))
    except OSError as e:
        advice = "fix that" if resume else "fix that, or choose another --out_dir="
        raise BadInput(f"{out_dir} can't be written to ({e.strerror}): {advice}.") from None


def tidy(out_dir):
    """Clean up a run folder after its last writer was killed. The caller must hold its lock."""
    folder = Path(out_dir)
    for replaced in folder.glob("checkpoints/step_*.replaced"):
        if not replaced.with_suffix("").exists():
            replaced.rename(replaced.with_suffix(""))
    remove(out_dir, STALE_FILES)


def claim(out_dir):
    """Lock a run folder. Returns "nothing" if there is no run, "run", or "restarted" for a run that this same
    torchrun started. Every rank must call."""
    def take():
        if not (Path(out_dir) / "config.json").exists():
            return "nothing"
        check_kinds(out_dir)
        lock.take(Path(out_dir) / lock.NAME, out_dir)
        tidy(out_dir)
        try:
            began = read_model(out_dir).get("launch")
        except BadInput:                                      # raised again where the file is needed
            began = None
        return "restarted" if began and began == launch() else "run"
    return distributed.on_main(take)


def launch():
    """Return an identifier of this torchrun, None without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    began = None
    with contextlib.suppress(OSError):       # in a container torchrun's number is always the same
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return [os.environ["TORCHELASTIC_RUN_ID"], socket.gethostname(), parent, began]
