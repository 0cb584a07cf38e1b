"""The engines of an installation, or of a job: whether they work where they live, and how to set one up.

An engine is tried in a process of the interpreter that it lives in; this one imports none. Invariant: nothing that is
there is changed, and what is made is made where nothing was.
"""

from headrace.engines.doctor import Diagnosis, diagnose_installed, diagnose_job
from headrace.engines.setting_up import VENVS, create
from headrace.engines.text import as_plain, as_text

__all__ = [
    "VENVS",
    "Diagnosis",
    "as_plain",
    "as_text",
    "create",
    "diagnose_installed",
    "diagnose_job",
]
