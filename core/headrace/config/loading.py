"""Job file and overrides to :class:`Job`: what can be judged without loading a plugin.

Tables become models in three steps: core's keys are parted from the plugin's, every phase gets its own merged
tables, and the whole is validated at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.extending import read_extended
from headrace.config.findings import raise_errors
from headrace.config.schema import (
    EnvironmentConfig,
    Job,
    LauncherConfig,
    ModelConfig,
    PluginConfig,
    QuantizationConfig,
    RolloutConfig,
    StorageConfig,
    Table,
    TrainerConfig,
)
from headrace.config.sources import Sources
from headrace.config.transports import AUTO
from headrace.errors import ConfigError, RunError
from headrace.validation import Path as KeyPath
from headrace.validation import near_miss, unknown_key, validate

PLUGIN_TABLES: Mapping[str, tuple[str, type[Table], str]] = {
    "environment": ("environment", EnvironmentConfig, ""),
    "rollout": ("inference_engine", RolloutConfig, ""),
    "storage": ("storage", StorageConfig, "memory"),
    "weights": ("weight_transport", PluginConfig, AUTO),
    "launcher": ("launcher", LauncherConfig, "local"),
    "quantization": ("quantization", QuantizationConfig, ""),
}
"""Table → role, core's own keys, default plugin."""
OPTIONAL_TABLES = frozenset({"quantization"})
"""Those of them that a job may leave out, and then has no such plugin."""

PHASE_TABLES: Mapping[str, tuple[str, str, str]] = {
    "algorithm": ("algorithm", "use", ""),
    "trainer": ("training_engine", "use", ""),
    "staleness": ("staleness", "policy", "synchronous"),
}
"""Table that a phase may override → role, key that names the plugin, default plugin."""

TABLES = frozenset(
    {"job", "model", "batch", "stages", "network", "evaluation", "checkpoint", "simulation"}
    | {*PLUGIN_TABLES, *PHASE_TABLES}
)
PHASE_KEYS = frozenset({"name", "steps", "until", "batch", *PHASE_TABLES})
NODE_KEYS = frozenset({"python", "threads"})
"""Keys of ``[trainer]`` that belong to its process and cannot change between phases."""

_TRUNCATED = ("top_p", "top_k", "min_p")


def selector(table: str) -> str:
    """The key of a table that names its plugin."""
    if table in PHASE_TABLES:
        return PHASE_TABLES[table][1]
    return "scheme" if table == "quantization" else "use"


def core_keys(table: str) -> frozenset[str]:
    """Core's own keys of a table that also holds a plugin's settings."""
    if table in PHASE_TABLES:
        return frozenset({selector(table), *(NODE_KEYS if table == "trainer" else ())})
    return frozenset({selector(table), *PLUGIN_TABLES[table][1].model_fields}) - {"spec"}


def load_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Read a job file, with what it extends, and apply ``a.b=value`` overrides. ConfigError (all problems at once) when
    it cannot be a job. No plugin is imported: :func:`check_job` judges their settings."""
    file = Path(path)
    sources = read_extended(file, name=os.fspath(path))
    for text in overrides:
        sources.override(text)
    return _load(sources, directory=file.resolve().parent)


def load_resolved(path: Path, *, directory: str) -> Job:
    """The job that ``job.json`` of a run holds. ``directory``: of the job file it once was. RunError when it holds
    none."""
    try:
        data = _without_none(json.loads(path.read_text(encoding="utf-8")))
        problem = "" if isinstance(data, dict) and data else "it holds no job"
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise RunError(
            f"the job of the run cannot be read: {problem}",
            origin=str(path),
            fix="put the file back as the run wrote it; nothing else says what the run is to do",
        )
    return _load(Sources(file=str(path), data=data), directory=Path(directory))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _load(sources: Sources, *, directory: Path) -> Job:
    loader = _Loader(sources, directory=directory)
    job, problems = validate(Job, loader.plain())
    for problem in problems:
        if problem.path not in loader.reported and problem.path[:1] not in loader.unreadable:
            places = _written_as(problem.path)
            fix = f"{problem.fix} to {_table_of(places[0])}" if problem.missing else _FIXES.get(problem.path[-2:])
            loader.error(problem.message, *places, fix=fix or problem.fix)
    raise_errors(loader.errors)
    assert job is not None, "validate gives a value or problems"
    job._sources = sources
    return job


_FIXES: Mapping[KeyPath, str] = {
    ("rollout", "temperature"): "log-probs need a temperature above 0; evaluation samples greedily without being told",
    ("rollout", "autoscale"): "write a table [rollout.autoscale] with a max, and a min that is not above it",
    ("model",): 'write path = "FOLDER" or a table [model.scratch], not both',
    ("job", "name"): 'use at most 100 letters, digits, ".", "_" and "-"',
}


def _written_as(path: KeyPath) -> tuple[KeyPath, ...]:
    """Where a key of the model is written in a job file: in the phase, or in the table that all phases share."""
    path = tuple(step for step in path if step not in ("spec", "settings"))
    if path[:1] != ("phases",):
        return (path,)
    inside = path[2:]
    if inside[:1] in ((), ("name",), ("until",)):
        return (("phase", *path[1:]),)
    return ("phase", *path[1:]), inside, ("job", *inside)


def _table_of(path: KeyPath) -> str:
    """The table that a key belongs in, as a job file writes it. What phases share need not be in each."""
    *table, _ = (str(step) for step in path if isinstance(step, str))
    if len(table) > 1 and table[0] == "phase":
        del table[0]
    return f"[[{table[0]}]]" if table == ["phase"] else f"[{'.'.join(table)}]"


class _Loader:
    """Builds the plain values of a :class:`Job` and gathers what is wrong on the way."""

    def __init__(self, sources: Sources, *, directory: Path) -> None:
        self.sources = sources
        self.directory = directory
        self.errors: list[ConfigError] = []
        self.reported: set[KeyPath] = set()
        """Paths in the model that already have an error, so that validation need not add one."""
        self.unreadable: set[KeyPath] = set()
        """Tables whose keys are not worth another error."""

    def error(self, message: str, *candidates: KeyPath, fix: str) -> None:
        self.errors.append(ConfigError(message, origin=self.sources.origin(*candidates), fix=fix))

    def plain(self) -> dict[str, Any]:
        data = self.sources.data
        if not data:
            fix = "start from a job that works: examples/sort_symbols/job.toml"
            raise ConfigError("the job file sets nothing", origin=self.sources.file, fix=fix)
        self._refuse_unknown(data, (), TABLES | {"observers", "phase"})
        tables = {name: self._table(name) for name in TABLES}
        self._refuse_misplaced(tables)
        self._refuse_truncated(tables["rollout"])
        job = dict(tables["job"])
        steps = job.pop("steps", None)
        return {
            "job": job,
            "model": self._model(tables["model"]),
            "stages": tables["stages"],
            "network": tables["network"],
            "evaluation": tables["evaluation"],
            "checkpoint": tables["checkpoint"],
            "simulation": tables["simulation"],
            **{name: self._plugin_table(name, tables[name]) for name in PLUGIN_TABLES if self._is_there(name)},
            "trainer": self._trainer(tables["trainer"]),
            "observers": self._observers(data.get("observers", ["console"])),
            "phases": self._phases(tables, steps),
            "directory": str(self.directory),
        }

    def _table(self, name: str, data: Mapping[str, Any] | None = None, path: KeyPath = ()) -> dict[str, Any]:
        value = (self.sources.data if data is None else data).get(name, {})
        if isinstance(value, dict):
            return value
        self.error(f"{name} should be a table", (*path, name), fix=f"write a table [{name}] with keys below it")
        self.unreadable.add((*path, name))
        return {}

    def _is_there(self, name: str) -> bool:
        return name not in OPTIONAL_TABLES or name in self.sources.data

    def _refuse_misplaced(self, tables: dict[str, dict[str, Any]]) -> None:
        """A table that stands inside another one, and is missing where it belongs, is judged there."""
        for outer in sorted(TABLES - {"model"}):
            for name in sorted(TABLES & tables[outer].keys() - self.sources.data.keys()):
                if isinstance(inner := tables[outer][name], dict):
                    message = f"[{outer}.{name}] belongs to {outer}, and there is no [{name}]"
                    self.error(message, (outer, name), fix=f"write [{name}]")
                    tables[outer] = {key: value for key, value in tables[outer].items() if key != name}
                    tables[name] = inner

    def _refuse_unknown(self, table: Mapping[str, Any], path: KeyPath, known: frozenset[str]) -> None:
        for key in sorted(set(table) - known):
            problem = unknown_key((*path, key), known)
            self.error(problem.message, problem.path, fix=problem.fix)

    def _refuse_truncated(self, rollout: Mapping[str, Any]) -> None:
        for key in _TRUNCATED:
            if key in rollout:
                self.error(
                    f"{key} truncates the distribution: the engine's log-probs would be renormalised over the kept "
                    "tokens while the trainer's cover the whole vocabulary, so every ratio would carry a hidden factor",
                    ("rollout", key),
                    fix=f"remove {key}; sharpen the samples with rollout.temperature",
                )

    def _model(self, table: Mapping[str, Any]) -> dict[str, Any]:
        path, stray = table.get("path"), table.keys() - ModelConfig.model_fields.keys()
        if stray and not table.keys() & ModelConfig.model_fields.keys():
            self.error(
                f"model has neither path nor scratch; {', '.join(sorted(stray))} may be of a fresh model",
                ("model",),
                fix='write them in [model.scratch], or path = "FOLDER" in [model]',
            )
            self.unreadable.add(("model",))
        return {**table, "path": self._absolute(path)} if isinstance(path, str) else dict(table)

    def _absolute(self, path: str) -> str:
        return os.path.normpath(self.directory / Path(path).expanduser())

    def _paths(self, table: dict[str, Any]) -> dict[str, Any]:
        """``python`` is a path from the job file's folder, or a command when it has no slash."""
        python = table.get("python")
        return {**table, "python": self._absolute(python)} if isinstance(python, str) and "/" in python else table

    def _plugin_table(self, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
        role, _, default = PLUGIN_TABLES[name]
        known, selecting = core_keys(name), selector(name)
        settings = {key: value for key, value in table.items() if key not in known}
        core = {key: value for key, value in table.items() if key in known and key != selecting}
        for key in sorted(known - set(core) - {selecting}):
            self._hint_missing(name, key, settings)
        use = self._use(table, selecting, default, role, (name, selecting))
        return {**self._paths(core), "spec": self._spec(role, use, settings, (name, selecting))}

    def _trainer(self, table: Mapping[str, Any]) -> dict[str, Any]:
        self.reported.add(("trainer", "use"))  # judged where each phase's trainer is put together
        return self._paths({key: value for key, value in table.items() if key in TrainerConfig.model_fields})

    def _hint_missing(self, name: str, key: str, settings: Mapping[str, Any]) -> None:
        field = PLUGIN_TABLES[name][1].model_fields[key]
        meant = near_miss(key, settings) if field.is_required() else None
        if meant:
            self.error(f"{key} is missing. Is it {meant!r}?", (name, meant), fix=f"rename {meant} to {key}")
            self.reported.add((name, key))

    def _use(self, table: Mapping[str, Any], key: str, default: str, role: str, *candidates: KeyPath) -> str:
        use = table.get(key, default)
        if isinstance(use, str) and use:
            return use
        what = f"{key} should be text" if key in table else f"{key} is missing: it names the {role}"
        place = "" if role == "observer" else f" in {_table_of(candidates[-1])}"
        self.error(what, *candidates, fix=f'write {key} = "NAME"{place}; list candidates with: headrace plugins {role}')
        return ""

    def _spec(self, role: str, use: str, settings: Mapping[str, Any], *candidates: KeyPath) -> dict[str, Any]:
        origin = self.sources.origin(*candidates)
        if not any(map(self.sources.written, candidates)):
            origin += f', which names no {role}: "{use}" is the default'
        spec = {"role": role, "use": use, "settings": dict(settings)}
        return {**spec, "origin": origin, "directory": str(self.directory)}

    def _observers(self, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            self.error("observers should be a list", ("observers",), fix='for example observers = ["console"]')
            return []
        specs = []
        for index, item in enumerate(value):
            path: KeyPath = ("observers", index)
            table = item if isinstance(item, dict) else {"use": item}
            settings = {key: v for key, v in table.items() if key != "use"}
            use = self._use(table, "use", "", "observer", path, ("observers",))
            specs.append(self._spec("observer", use, settings, (*path, "use"), ("observers",)))
        return specs

    def _phases(self, tables: Mapping[str, dict[str, Any]], steps: Any) -> list[dict[str, Any]]:
        phases = self.sources.data.get("phase")
        self.reported.add(("phases",))  # an empty list only follows an error below
        if phases is None:
            if steps is None and ("job",) not in self.unreadable:
                self._no_phases(("job", "steps"))
            return [self._phase(tables, {"name": "main", "steps": steps}, 0)] if steps is not None else []
        if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
            self.error("phase should be a list of tables", ("phase",), fix="begin each phase with [[phase]]")
            return []
        if not phases and steps is None:
            self._no_phases(("phase",))
        if steps is not None:
            fix = "remove it from [job]; every [[phase]] has its own steps" if phases else "remove phase = []"
            self.error("steps stands beside phases, which would ignore it", ("job", "steps"), fix=fix)
        self._refuse_repeated_names(phases)
        return [self._phase(tables, phase, index) for index, phase in enumerate(phases)]

    def _no_phases(self, place: KeyPath) -> None:
        fix = "add steps = ... (training batches) to [job], or a [[phase]] with a name and steps of its own"
        self.error("the job has no phases: steps is missing", place, fix=fix)

    def _refuse_repeated_names(self, phases: Sequence[Mapping[str, Any]]) -> None:
        names = [phase.get("name") for phase in phases]
        for index, name in enumerate(names):
            if name is not None and name in names[:index]:
                fix = "give every phase a name of its own"
                self.error(f"two phases are named {name!r}", ("phase", index, "name"), fix=fix)

    def _phase(self, tables: Mapping[str, dict[str, Any]], phase: Mapping[str, Any], index: int) -> dict[str, Any]:
        path: KeyPath = ("phase", index)
        self._refuse_unknown(phase, path, PHASE_KEYS)
        plain = {key: value for key, value in phase.items() if key in ("name", "steps", "until")}
        plain["batch"] = {**tables["batch"], **self._table("batch", phase, path)}
        for name in PHASE_TABLES:
            own = self._table(name, phase, path)
            plain[name] = self._phase_plugin(name, tables[name], own, path)
        return plain

    def _phase_plugin(
        self, name: str, base: Mapping[str, Any], own: Mapping[str, Any], path: KeyPath
    ) -> dict[str, Any]:
        role, key, default = PHASE_TABLES[name]
        if name == "trainer":
            self._refuse_node_keys(base, own, (*path, name))
        replaced = key in own and own[key] != base.get(key, default)
        merged = dict(own) if replaced else {**base, **own}
        candidates: tuple[KeyPath, ...] = ((*path, name, key), (name, key))
        use = self._use(merged, key, default, role, *candidates)
        settings = {k: v for k, v in merged.items() if k not in core_keys(name)}
        if name == "staleness":
            settings.setdefault("max_staleness", 0)
        return self._spec(role, use, settings, *candidates)

    def _refuse_node_keys(self, base: Mapping[str, Any], own: Mapping[str, Any], path: KeyPath) -> None:
        for key in sorted(own):
            if key in NODE_KEYS or (key == "use" and own[key] != base.get("use")):
                self.error(
                    f"a phase cannot change {key} of the trainer: one process trains all phases",
                    (*path, key),
                    fix="set it in [trainer]",
                )
