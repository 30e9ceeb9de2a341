"""Where the time of a script's steps goes: operations or kernels, memory, and a trace."""
import contextlib
import importlib
import io

import torch

from measure.runs import WARM_UP
from runtime import guard, optim


def bench_profile(cfg, hw, work, handed, say):
    """The script runs in this process, its main called with the arguments that a process would get; what
    every optimizer step ends with, optim.apply_step, is wrapped to start torch.profiler after WARM_UP steps
    and to stop it `steps` later. The script has no part in it."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (hw.device.type == "cuda")
    profiler, apply_step, done = torch.profiler.profile(activities=activities, profile_memory=cfg.memory), optim.apply_step, 0
    # of the optimizers, in a step of grpo.py
    each = getattr(work.config, "inner_epochs", 1) * getattr(work.config, "mini_batches", 1)

    def counted(*arguments):
        nonlocal done
        result, done = apply_step(*arguments), done + 1
        if done == each * WARM_UP:
            profiler.start()
        if done == each * (WARM_UP + work.steps):
            profiler.stop()
        return result
    optim.apply_step = counted
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = importlib.import_module(work.script.removesuffix(".py")).main(list(map(str, work.arguments)))
    finally:
        optim.apply_step = apply_step
    if code or done < each * (WARM_UP + work.steps):
        raise guard.Failure(f"{work.script} made {done} optimizer steps instead of "
                            f"{each * (WARM_UP + work.steps)}, so there is no profile.")
    profiler.export_chrome_trace(str(trace := cfg.output.with_suffix(".trace.json")))
    cuda = hw.device.type == "cuda"
    side = "self_device_time_total" if cuda else "self_cpu_time_total"
    # on a GPU kernels, of which operations would count the time again
    events = [event for event in profiler.key_averages()
              if not cuda or event.device_type == torch.profiler.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)]
    events.sort(key=lambda event: -getattr(event, side))
    whole = sum(getattr(event, side) for event in events)
    table = [{"name": e.key, "calls": e.count, "ms_a_step": getattr(e, side) / 1e3 / work.steps, "share": getattr(e, side) / max(1, whole)}
             for e in events[:15]]
    say(f"\n{work.what}; {work.steps} steps after {WARM_UP}, {hw.dtype} on {hw.name}: "
        f"{whole / 1e3 / work.steps:,.1f} ms a step in "
        f"{'kernels' if cuda else 'operations, without what they call'}")
    say(f"{'':58} {'calls a step':>12} {'ms a step':>10} {'share':>6}")
    for row in table:
        say(f"{row['name'][:58]:58} {row['calls'] / work.steps:12,.1f} {row['ms_a_step']:10,.2f} "
            f"{row['share']:6.1%}")
    found = {"what": work.what, "consumers": table, "trace": str(trace), "ms_a_step": whole / 1e3 / work.steps}
    if cfg.memory:
        kept = f"self_{'device' if cuda else 'cpu'}_memory_usage"
        takers = sorted(profiler.key_averages(), key=lambda event: -abs(getattr(event, kept)))[:15]
        found["memory"] = [{"name": e.key, "mib_a_step": getattr(e, kept) / 2**20 / work.steps} for e in takers]
        say(f"\n{'memory taken, less what was given back':58} {'MiB a step':>12}")
        for row in found["memory"]:
            say(f"{row['name'][:58]:58} {row['mib_a_step']:12,.2f}")
    say(f"The trace is {trace}: open it at chrome://tracing or ui.perfetto.dev.")
    return found
