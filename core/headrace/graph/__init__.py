"""A job for reading, before anything starts: its processes and who talks to whom, and the stages of each phase with the
columns that go from one to the next, as text or as a picture.

Invariant: what is shown follows from the job and the plugins' declarations alone.
"""

from headrace.graph.picture import draw
from headrace.graph.text import describe

__all__ = ["describe", "draw"]
