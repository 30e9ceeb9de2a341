"""How busy a GPU is, as nvidia-smi sees it while something else runs there."""
import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time

FIELDS = ("utilization.gpu", "memory.used", "power.draw")    # %, MiB, W
INTERVAL = 0.25                              # seconds between two looks
WINDOW = 2.0                                 # seconds over which utilisation is averaged


class Utilization:
    """A context in which a thread asks nvidia-smi four times a second; figures() afterwards. Where there is
    no nvidia-smi there are none."""

    def __init__(self):
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
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        query = f"--query-gpu={','.join(FIELDS)}"
        command = ["nvidia-smi", f"--id={card}", query, "--format=csv,noheader,nounits"]
        while not self.ended.wait(INTERVAL):
            try:
                answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                return
            if answer.returncode:
                return
            self.samples.append((time.perf_counter(), *map(number, answer.stdout.split(","))))

    def figures(self):
        """Return {busiest_2s: the mean utilisation, 0 to 1, of the two seconds in which that was highest,
        memory_used_gb and power_w: the most of each}, without what nvidia-smi does not know."""
        figures = {}
        busy = [(when, share) for when, share, *_ in self.samples if share is not None]
        if busy:
            windows = [[s for t, s in busy if start <= t < start + WINDOW] for start, _ in busy]
            fullest = max(map(len, windows))             # those at the end are shorter
            figures["busiest_2s"] = max(statistics.fmean(w) for w in windows if 2 * len(w) > fullest) / 100
        for i, name, unit in ((2, "memory_used_gb", 1024), (3, "power_w", 1)):
            known = [sample[i] for sample in self.samples if sample[i] is not None]
            if known:
                figures[name] = max(known) / unit
        return figures


def number(text):
    """Return a number of nvidia-smi's, or None for its [N/A]."""
    with contextlib.suppress(ValueError):
        return float(text)
