"""A job, run: the loop a reader opens first is :mod:`headrace.run.loop`."""

from headrace.run.control import scale
from headrace.run.runner import resume_job, run_job

__all__ = ["resume_job", "run_job", "scale"]
