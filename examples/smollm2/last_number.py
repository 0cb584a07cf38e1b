"""A model that talks: what it says last is its answer."""

import re


def reward(answer: str, finish_reason: str, record: dict) -> float:
    """1 when the model came to an end and the last number it names is right."""
    numbers = re.findall(r"-?\d+", answer)
    return float(finish_reason == "stop" and numbers[-1:] == [record["answer"]])
