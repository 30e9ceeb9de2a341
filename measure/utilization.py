"""Sample a GPU's utilisation, memory and power with nvidia-smi while a script runs."""
import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time

FIELDS = ("utilization.gpu", "memory.used", "power.draw")    # %, MiB, W
INTERVAL = 0.25                              # seconds between two samples
WINDOW = 2.0                                 # seconds over which utilisation is averaged


class Utilization:
    """Context manager whose thread queries nvidia-smi, if it is installed; then see figures()."""

    def __init__(self, index=0):
        self.index = index                   # PyTorch's number of the GPU
        self.samples = []                    # (time, one number or None for each of FIELDS)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        if shutil.which("nvidia-smi"):
            self.thread.start()
        return self

    def __exit__(self, kind, error, traceback):
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def watch(self):
        query = f"--query-gpu={','.join(FIELDS)}"
        command = ["nvidia-smi", f"--id={visible_id(self.index)}", query, "--format=csv,noheader,nounits"]
        while not self.ended.wait(INTERVAL):
            try:
                answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                return
            if answer.returncode:
                return
            self.samples.append((time.perf_counter(), *map(number, answer.stdout.split(","))))

    def figures(self):
        """Return {busiest_2s: highest mean utilisation over two seconds, 0 to 1, memory_used_gb, power_w:
        maxima}, without fields that nvidia-smi does not report."""
        figures = {}
        busy = [(when, share) for when, share, *_ in self.samples if share is not None]
        if busy:
            windows = [[s for t, s in busy if start <= t < start + WINDOW] for start, _ in busy]
            fullest = max(map(len, windows))             # windows at the end are shorter
            figures["busiest_2s"] = max(statistics.fmean(w) for w in windows if 2 * len(w) > fullest) / 100
        for i, name, unit in ((2, "memory_used_gb", 1024), (3, "power_w", 1)):
            known = [sample[i] for sample in self.samples if sample[i] is not None]
            if known:
                figures[name] = max(known) / unit
        return figures


def visible_id(index):
    """Return nvidia-smi's name of PyTorch's GPU number `index`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def number(text):
    """Return a number that nvidia-smi printed, or None for its [N/A]."""
    with contextlib.suppress(ValueError):
        return float(text)
