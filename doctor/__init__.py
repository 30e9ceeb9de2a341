"""Diagnosis and plots of a run folder."""


def start(lines):
    """Return the Doctor of a run with these lines of metrics.jsonl. Only runs with --diagnose load its
    checks."""
    from doctor.diagnose import Doctor
    return Doctor(lines)
