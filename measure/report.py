"""Report the checks of a measure.gpu.run process: one line of JSON a check, on standard output.

As a pytest plugin (-p measure.report) it reports each test with its recorded properties.
"""
import json


def outcome(name, status="ok", seconds=None, figures=None, error=None):
    """Return the record of a check. status: ok | failed | skipped | timeout; error: a sentence if not ok."""
    return {"name": name, "status": status, "seconds": seconds, "figures": figures or {}, "error": error}


def print_record(**content):
    print(f"\n{json.dumps(content)}", flush=True)            # on a line of its own, after pytest's dots


def pytest_runtest_logstart(nodeid, location):
    print_record(begins=nodeid)


def pytest_runtest_logreport(report):
    """Report a test after its call, or after a setup or teardown that failed or skipped it."""
    if report.when != "call" and report.passed:
        return
    error = None
    if report.skipped:
        error = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = (crash.message if crash else str(report.longrepr)).strip().splitlines()[0]
    status = "ok" if report.passed else report.outcome
    figures = dict(report.user_properties)
    print_record(**outcome(report.nodeid, status, round(report.duration, 3), figures, error))
