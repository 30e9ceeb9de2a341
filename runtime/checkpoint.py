"""Checkpoints that are whole or not there, and the rest of a run folder.

    out/run/config.json               every knob, resolved
            model.json                architecture, tokenizer, prompt template: with any checkpoint's weights,
                                      the model
            tokenizer.json            if it is Hugging Face's
            base.safetensors          with LoRA: the frozen weights, and base.sha256; the checkpoints' are the
                                      adapters alone. Of grpo.py with a KL term: the reference's weights
            run.lock                  while a process writes here
            samples.txt               of grpo.py: answers to the same questions as training goes on
            metrics.jsonl training.log
            bad_batch_step_5_rank_0.pt                    what a run that diverged was learning from
            tensorboard/ wandb/ wandb_id                  with --tensorboard, --wandb
            retry.json                after a failed step: what is to be different when the run goes on
            checkpoints/step_00000100/model.safetensors   weights, readable by anyone
                                      optimizer.safetensors   what the optimizers keep of each weight, and
                                      state.json          all else that resuming needs; both are absent with
                                                          save_only_model, and one file state.pt in old runs
                                      meta.json           step, validation loss, config, SHA-256 of the files
                                                          beside it
"""
import contextlib
import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import stat
import struct
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from runtime import lock
from runtime.config import LARGEST, BadInput, parse_json, read_sealed, seal
from runtime.progress import ProgressLine

# All that a run writes into its folder (wandb keeps to one of its own). When a run begins none of it may be
# there, unless it is an earlier run's: then it goes, and nothing else does. By the first two a run is known;
# they are replaced, so that they are never missing.
KNOWN_BY = ("model.json", "config.json")
ATOMIC = (*KNOWN_BY, "metrics.jsonl", "tokenizer.json", "base.sha256", "retry.json")
# What a writer that was killed leaves; the next start removes it.
UNFINISHED = tuple(f"{name}.tmp-[0-9]*" for name in ATOMIC)
LEFT = (*UNFINISHED, "base.partial*", "checkpoints/partial*",
        "checkpoints/step_" + 8 * "[0-9]" + ".replaced")
WRITTEN = (*KNOWN_BY, lock.NAME, "metrics.jsonl", "training.log", "samples.txt", "tokenizer.json", "base.safetensors",
           "base.sha256", "retry.json", "retreat.json", "wandb_id", "bad_batch_step_*_rank_*.pt",
           "checkpoints/step_" + 8 * "[0-9]", "tensorboard/events.out.tfevents.*", *LEFT)


SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
               torch.int64: "I64"}


# --- files that are whole or not there ---

def fsync(path):
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path, content):
    """Replace the file by `content` (bytes): after a crash it holds the old or the new, never a part."""
    temporary = Path(f"{path}.tmp-{os.getpid()}")             # another process may be writing it too
    try:
        temporary.write_bytes(content)
        fsync(temporary)
        temporary.rename(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(e.errno, e.strerror, str(path)) from None        # a full disk names no file
    fsync(Path(path).parent)


def is_full(error):
    """Tell whether an exception says that a disk, or a share of it, is full."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


def not_written(what, error, then):
    """Return the BadInput for what could not be written. then: what to do when its cause is mended."""
    reason = getattr(error, "strerror", None) or error
    advice = "free some space" if is_full(error) else "mend that"
    return BadInput(f"{what} could not be written ({reason}): {advice}, and {then}.")


def inside(folder, name):
    """Return folder / name. BadInput if a name that a file gave leads out of the folder (links may)."""
    path = Path(name) if isinstance(name, str) and "\0" not in name else None
    if not path or not path.name or path.is_absolute() or ".." in path.parts:
        raise BadInput(f"{folder} names {str(name)[:80]!r} as a file of its own, which is no path in it: get "
                       "it again.")
    return Path(folder) / name


def sha256(path):
    with open(path, "rb") as f, ProgressLine(f"checking {path}"):
        if hasattr(hashlib, "file_digest"):                   # from Python 3.11 on
            return hashlib.file_digest(f, "sha256").hexdigest()
        return hashlib.sha256(f.read()).hexdigest()


def write_tensors(path, tensors, values):
    """Write a safetensors file of {name: tensor}, of which names, dtypes and shapes are read here. Their
    contents are taken from `values`, one after another: safetensors' own save_file wants all of them in
    memory."""
    header = {}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)                     # so that numbers begin at multiples of 8
    with open(path, "wb") as file, ProgressLine(f"writing {path.name}", end, "B") as line:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _ in header:
            value = next(values)
            line.add(file.write(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            del value                        # before the next is gathered


# --- checkpoints ---

def step_folder(out_dir, step):
    return Path(out_dir) / "checkpoints" / f"step_{step:08d}"


def save(out_dir, step, weights, state=None, moments=None, val_loss=None, keep_last=2, config=None, values=None):
    """Write the checkpoint of `step`, then drop all but the newest keep_last and the one of least validation
    loss.

    weights: {name: tensor}. What resuming needs, None without: state, a dictionary as JSON has them, and
    moments, {name: tensor}, the optimizers'. values: both their tensors in order, if they are sharded: whole.
    Written under another name, flushed to the disk, then renamed. If the disk is full the earlier checkpoints
    stay as they were, one of this same step too.
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
            final.rename(replaced)            # `tidy` puts it back if this process ends right here
        partial.rename(final)
        fsync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(f"The checkpoint of step {step} in {folder}", e,
                          "go on with --init_from=resume; the earlier checkpoints are untouched") from None
    newest = [other for other in steps(out_dir) if other <= step][-keep_last:]
    kept = [*newest, best(out_dir, step)]
    for other in steps(out_dir):              # a later step than this one was damaged, or was rolled back
        if other not in kept:
            shutil.rmtree(step_folder(out_dir, other), ignore_errors=True)


def steps(out_dir):
    """Return the steps that have a checkpoint, in order."""
    folders = Path(out_dir, "checkpoints").glob("step_*")
    matches = [re.fullmatch(r"step_(\d{8,})", folder.name) for folder in folders]
    return sorted(int(match[1]) for match in matches if match)


def read_meta(out_dir, step):
    """Return the meta.json of a checkpoint; {} if it can't be read, or is not as `save` wrote it."""
    try:
        meta = read_sealed(step_folder(out_dir, step) / "meta.json", "restore it")
    except BadInput:
        return {}
    digests = meta.get("sha256")
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        return {}
    loss = meta.get("val_loss")
    return meta if loss is None or type(loss) is float or type(loss) is int and abs(loss) <= LARGEST else {}


def best(out_dir, last=math.inf):
    """Return the step of least validation loss among the checkpoints (up to step `last`); None if none was
    evaluated."""
    losses = {}
    for step in steps(out_dir):
        loss = read_meta(out_dir, step).get("val_loss") if step <= last else None
        if loss is not None and math.isfinite(loss):
            losses[step] = loss
    return min(losses, key=losses.get) if losses else None


def best_loss(out_dir, last=math.inf):
    """Return the least validation loss among the checkpoints up to step `last`; infinity if none was
    evaluated."""
    step = best(out_dir, last)
    return math.inf if step is None else read_meta(out_dir, step)["val_loss"]


def damage(out_dir, step):
    """Return None if every file of the checkpoint is as it was written, else what is wrong with it."""
    folder = step_folder(out_dir, step)
    expected = read_meta(out_dir, step).get("sha256")
    if not expected:
        return "meta.json is missing or unreadable"
    for name, digest in expected.items():
        if Path(name).name != name:
            return f"meta.json names {name}, which is no file beside it"
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            if sha256(folder / name) != digest:
                return f"{name} fails its checksum"
        except OSError as e:
            return f"{name} can't be read: {e.strerror}"
    return None


def newest_intact(out_dir, log=print):
    """Return the newest step whose checkpoint is whole, None if there is none. Damaged ones are named (by
    log, which prints a line) and passed over."""
    for step in reversed(steps(out_dir)):
        problem = damage(out_dir, step)
        if problem is None:
            return step
        log(f"The checkpoint of step {step} in {out_dir} is damaged ({problem}); trying the one before.")
    return None


@contextlib.contextmanager
def loading(what):
    """Turn what files raise that hold no weights, or another model's, into BadInput. what: they are, with
    their folder."""
    try:
        with ProgressLine(f"loading {what[0].lower()}{what[1:]}"):
            yield
    except torch.OutOfMemoryError:           # a RuntimeError too, of which the files know nothing
        raise
    except (OSError, SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, ValueError, TypeError,
            LookupError, AttributeError) as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise BadInput(f"{what} can't be loaded ({reason}): put back the files of one model as they were "
                       "written, or choose another.") from None


def load_weights(out_dir, step, device="cpu"):
    """Return {name: tensor} of a checkpoint."""
    return load_file(step_folder(out_dir, step) / "model.safetensors", device=str(device))


def save_base(out_dir, weights, values=None):
    """Write the frozen weights that a run's adapters stand beside, once for all its checkpoints. values: see
    save."""
    partial = Path(out_dir) / f"base.partial-{os.getpid()}"
    final = Path(out_dir) / "base.safetensors"
    try:
        write_tensors(partial, weights, values or iter(weights.values()))
        fsync(partial)
        partial.rename(final)
        write_atomically(Path(out_dir) / "base.sha256", sha256(final).encode())
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise not_written(final, e, "start again with --overwrite") from None


def load_base(out_dir, device="cpu"):
    """Return the {name: tensor} that save_base was given. BadInput if it is not as it was written."""
    file = Path(out_dir) / "base.safetensors"
    try:
        intact = sha256(file) == file.with_suffix(".sha256").read_text()
        problem = None if intact else "it fails its checksum"
    except (OSError, ValueError) as e:
        problem = getattr(e, "strerror", None) or e
    if problem:
        raise BadInput(f"{file}, the weights that the run began with, can't be used ({problem}): start again "
                       "from its model with --overwrite.")
    return load_file(file, device=str(device))


@contextlib.contextmanager
def open_tensors(out_dir, step, name="model.safetensors"):
    """Give {name: slice to be read from the file} of a checkpoint, while it is open."""
    with safe_open(step_folder(out_dir, step) / name, framework="pt") as file:
        yield {key: file.get_slice(key) for key in file.keys()}


def load_state(out_dir, step):
    """Return the state that `save` was given. Of an old run's it is {"optimizers": their state_dicts} and
    more."""
    folder = step_folder(out_dir, step)
    if (folder / "state.json").exists():
        return parse_json((folder / "state.json").read_bytes(), dict)
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    optimizers = state.pop("optimizers")
    return json.loads(json.dumps(state)) | {"optimizers": optimizers}


def has_state(out_dir, step):
    """Tell whether training can go on from the checkpoint, and not only be started from its weights."""
    return bool({"state.json", "state.pt"} & read_meta(out_dir, step).get("sha256", {}).keys())


# --- run folders ---

def read_model(out_dir):
    """Return the model.json of a run: architecture, tokenizer, prompt template."""
    return read_sealed(Path(out_dir) / "model.json", "restore it, or give the out_dir of another run")


def choose(out_dir, log=print):
    """Return the step whose weights stand for the run: the best evaluated, or the newest if none was.
    BadInput if there is none."""
    step = best(out_dir)
    if step is None or damage(out_dir, step):
        step = newest_intact(out_dir, log)
    if step is None:
        raise BadInput(f"{out_dir} has no intact checkpoint: give another run, or let this one go on until "
                       "it saves.")
    return step


def is_run(folder):
    """Tell whether open_run's model.json and config.json are there (or the first alone: killed between)."""
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
    """BadInput if a name of a run's is a link, through which it would write or remove files elsewhere, or a
    FIFO, at which it would wait: a folder may be a stranger's."""
    is_folder = {pattern.partition("/")[0]: "/" in pattern for pattern in WRITTEN}
    for path in sorted(Path(out_dir).iterdir()) if Path(out_dir).is_dir() else ():
        for name in is_folder:
            kind, is_it = ("folder", stat.S_ISDIR) if is_folder[name] else ("plain file", stat.S_ISREG)
            if fnmatch(path.name, name) and not is_it(path.lstat().st_mode):
                raise BadInput(f"{path} is a link or otherwise no {kind}, and a run writes there: move it "
                               "elsewhere, or choose another --out_dir=.")


def check_replaceable(out_dir, overwrite):
    """BadInput if a folder holds a run that may not be replaced, or what is not a run's."""
    folder = Path(out_dir)
    if not is_run(folder):
        taken = set()
        for pattern in set(WRITTEN) - set(UNFINISHED):        # killed as it wrote its first file: none of anybody's
            taken |= {path.name for path in folder.glob(pattern.partition("/")[0])}
        taken.discard(lock.NAME)              # whether it is ours lock.take looks
        if taken:
            raise BadInput(f"{out_dir} holds {', '.join(sorted(taken))}, not a run's, but in the way of "
                           "one: move it elsewhere, or choose another --out_dir= (--overwrite replaces runs "
                           "alone).")
    elif ((folder / "metrics.jsonl").exists() or steps(out_dir)) and not overwrite:
        raise BadInput(f"{out_dir} already holds a run: continue it with --init_from=resume, replace it with "
                       "--overwrite, or choose another --out_dir=.")


def remove(out_dir, patterns):
    """Remove what a run left by these names: files, and of folders those in checkpoints/."""
    for pattern in patterns:
        for path in list(Path(out_dir).glob(pattern)):
            if pattern.startswith("checkpoints/") and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def open_run(out_dir, config, model, overwrite=False, resume=False):
    """Write config.json and model.json; refuse an out_dir that holds a run (metrics or checkpoints) unless it
    is to be overwritten or resumed, and one that holds other files by the names of a run's."""
    folder = Path(out_dir)
    try:
        check_kinds(out_dir)
        if (folder / lock.NAME).exists():
            lock.take(folder / lock.NAME, out_dir)            # a run that writes there is not one to replace
        if not resume:
            check_replaceable(out_dir, overwrite)             # before anything of ours is in the folder
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(folder / lock.NAME, out_dir)
        if not resume:
            check_replaceable(out_dir, overwrite)             # another run may have begun there meanwhile
            remove(out_dir, [name for name in WRITTEN if name not in (*KNOWN_BY, lock.NAME)])
        write_atomically(folder / "model.json", seal(model))
        write_atomically(folder / "config.json", seal(config))
    except OSError as e:
        advice = "mend that" if resume else "mend that, or choose another --out_dir="
        raise BadInput(f"{out_dir} can't be written to ({e.strerror}): {advice}.") from None


def tidy(out_dir):
    """Put a run folder in order whose last writer was killed. Its lock must be held."""
    folder = Path(out_dir)
    for replaced in folder.glob("checkpoints/step_*.replaced"):
        if not replaced.with_suffix("").exists():
            replaced.rename(replaced.with_suffix(""))
    remove(out_dir, LEFT)
