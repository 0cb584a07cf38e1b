"""What a run leaves behind and who watches it: the event log, metrics, observers, the audit and the report.

The controller writes; everything else here reads. Invariant: nothing in this room changes a run, and ``audit``
shares no code with ``flow``, so that the one can convict the other.
"""
