"""A job, run: the loop a reader opens first is :mod:`headrace.run.loop`."""

from headrace.run.runner import run_job

__all__ = ["run_job"]
