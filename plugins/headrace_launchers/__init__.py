"""Launchers: where a node's process runs."""
