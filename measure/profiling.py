"""Profile a few steps of a script: operations or kernels, and a trace."""
import contextlib
import importlib
import io
from operator import attrgetter

import torch

from measure.runs import WARM_UP
from runtime import guard, optim


def run_profiled(work, profiler):
    """Call the script's main in this process, profiling work.steps steps after WARM_UP. optim.apply_step,
    which ends every optimizer step, is wrapped to start and stop the profiler. Raises Failure if the script
    makes fewer steps."""
    # optimizer steps in a step of grpo.py
    steps_each = getattr(work.config, "inner_epochs", 1) * getattr(work.config, "mini_batches", 1)
    first = steps_each * WARM_UP
    last = steps_each * (WARM_UP + work.steps)
    apply_step = optim.apply_step
    done = 0

    def counted(*arguments):
        nonlocal done
        result = apply_step(*arguments)
        done += 1
        if done == first:
            profiler.start()
        if done == last:
            profiler.stop()
        return result
    optim.apply_step = counted
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            script = importlib.import_module(work.script.removesuffix(".py"))
            code = script.main([str(argument) for argument in work.arguments])
    finally:
        optim.apply_step = apply_step
    if code or done < last:
        raise guard.Failure(f"{work.script} made {done} optimizer steps instead of {last}, so there is no "
                            "profile.")


def is_kernel(event):
    """Return whether an event is a GPU kernel; CPU operations would count its time again."""
    on_gpu = event.device_type == torch.profiler.DeviceType.CUDA
    return on_gpu and not getattr(event, "is_user_annotation", False)


def bench_profile(cfg, hw, work, script_args, log):
    """Profile a few steps of the script: log the operations or kernels that take most time, and write a trace
    next to the output."""
    cuda = hw.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    run_profiled(work, profiler)
    trace = cfg.output.with_suffix(".trace.json")
    profiler.export_chrome_trace(str(trace))
    # microseconds, without those of an event's children
    time_of = attrgetter("self_device_time_total" if cuda else "self_cpu_time_total")
    events = [event for event in profiler.key_averages() if not cuda or is_kernel(event)]
    events.sort(key=time_of, reverse=True)
    total = sum(map(time_of, events))
    ms_per_step = total / 1e3 / work.steps
    consumers = [{"name": event.key, "calls": event.count, "ms_a_step": time_of(event) / 1e3 / work.steps,
                  "share": time_of(event) / max(1, total)} for event in events[:15]]
    kinds = "kernels" if cuda else "operations, without their children"
    log(f"\n{work.description}; {work.steps} steps after {WARM_UP}, {hw.dtype} on {hw.name}: "
        f"{ms_per_step:,.1f} ms a step in {kinds}")
    log(f"{'':58} {'calls a step':>12} {'ms a step':>10} {'share':>6}")
    for row in consumers:
        log(f"{row['name'][:58]:58} {row['calls'] / work.steps:12,.1f} {row['ms_a_step']:10,.2f} "
            f"{row['share']:6.1%}")
    log(f"The trace is {trace}: open it at chrome://tracing or ui.perfetto.dev.")
    return {"what": work.description, "consumers": consumers, "trace": str(trace), "ms_a_step": ms_per_step}
