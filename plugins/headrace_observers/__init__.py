"""Observers of a run."""
