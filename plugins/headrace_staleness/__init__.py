"""Staleness policies: when groups may start, batches be taken and versions be published."""
