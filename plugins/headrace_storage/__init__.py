"""Storages: where column values of a storage unit live."""
