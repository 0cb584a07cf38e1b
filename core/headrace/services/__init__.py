"""Thin asyncio shells around ``flow``: one file per node, and the controller that drives them."""
