"""The environment as the controller has it, which makes tasks and plays none."""

from __future__ import annotations

import traceback

from headrace.contract import Environment, EnvironmentContext
from headrace.errors import HeadraceError, PluginError
from headrace.registry import PluginSpec, build


def started(spec: PluginSpec, *, model_path: str, seed: int) -> Environment:
    """PluginError, with its own line, when it raises."""
    environment = build(spec)
    assert isinstance(environment, Environment)
    try:
        environment.start(EnvironmentContext(model_path=model_path, seed=seed, directory=spec.directory))
    except HeadraceError:
        raise
    except Exception as error:  # a plugin's code may raise anything; it is wrapped once, here
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"environment {spec.use!r} did not start: {type(error).__name__}: {error}",
            origin=f"{line.filename}:{line.lineno} in {line.name}",
            fix="start what it needs, or correct its settings under [environment]",
        ) from error
    return environment
