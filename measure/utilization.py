"""Sample a GPU's utilisation, memory and power by NVML while a script runs."""
import contextlib
import statistics
import threading
import time

import torch

READINGS = ("utilization", "device_memory_used", "power_draw")           # of torch.cuda: %, bytes, mW
INTERVAL = 0.25                              # seconds between two samples
WINDOW = 2.0                                 # seconds over which utilisation is averaged


class Utilization:
    """Context manager whose thread reads NVML, if there is a GPU and nvidia-ml-py; then see figures()."""

    def __init__(self, index=0):
        self.index = index                   # PyTorch's number of the GPU
        self.samples = []                    # (time, a number or None for each of READINGS)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, error, traceback):
        self.ended.set()
        self.thread.join()

    def watch(self):
        while torch.cuda.is_available() and not self.ended.wait(INTERVAL):
            self.samples.append((time.perf_counter(), *(self.read(name) for name in READINGS)))

    def read(self, name):
        with contextlib.suppress(Exception):              # no NVML, or a card that lacks this reading
            return getattr(torch.cuda, name)(self.index)

    def figures(self):
        """Return {busiest_2s: highest mean utilisation over two seconds, 0 to 1, memory_used_gb, power_w:
        maxima}, without those that NVML does not report."""
        figures = {}
        busy = [(when, share) for when, share, *_ in self.samples if share is not None]
        if busy:
            windows = [[s for t, s in busy if start <= t < start + WINDOW] for start, _ in busy]
            fullest = max(map(len, windows))             # windows at the end are shorter
            figures["busiest_2s"] = max(statistics.fmean(w) for w in windows if 2 * len(w) > fullest) / 100
        for i, name, unit in ((2, "memory_used_gb", 2**30), (3, "power_w", 1000)):
            known = [sample[i] for sample in self.samples if sample[i] is not None]
            if known:
                figures[name] = max(known) / unit
        return figures
