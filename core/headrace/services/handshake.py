"""Controller and node, each with a headrace of its own interpreter, agree on the contract or go no further."""

from __future__ import annotations

import sys

import headrace
from headrace.contract import CONTRACT_VERSION
from headrace.errors import PluginError


def require_contract(node: str, *, of_node: int, of_controller: int) -> None:
    """PluginError with both numbers when they differ. One of them is this process's own, :data:`CONTRACT_VERSION`."""
    if of_node != of_controller:
        raise PluginError(
            f"node {node} has contract version {of_node}, its controller {of_controller}",
            origin=f"{sys.executable}, headrace {headrace.__version__}, contract version {CONTRACT_VERSION}",
            fix="install the same headrace into both interpreters: python -m pip install headrace==VERSION",
        )
