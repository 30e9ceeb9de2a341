"""What a process of studies.gpu.run tells it: a line of JSON a check, on standard output, once it is known.

As a plugin of pytest (-p measure.report) it tells of each test, with what the test recorded as properties.
"""
import json


def outcome(name, status="ok", seconds=None, figures=None, error=None):
    """Return what is said of a check. status: ok | failed | skipped | timeout; error: a sentence, where it is
    not ok."""
    return {"name": name, "status": status, "seconds": seconds, "figures": figures or {}, "error": error}


def tell(**content):
    print(f"\n{json.dumps(content)}", flush=True)            # pytest's dots may stand before it


def pytest_runtest_logstart(nodeid, location):
    tell(begins=nodeid)


def pytest_runtest_logreport(report):
    """Tell of a test: once, after its call, or after what kept it from being called or broke behind it."""
    if report.when != "call" and report.passed:
        return
    error = None
    if report.skipped:
        error = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = (crash.message if crash else str(report.longrepr)).strip().splitlines()[0]
    status = "ok" if report.passed else report.outcome
    tell(**outcome(report.nodeid, status, round(report.duration, 3), dict(report.user_properties), error))
