"""How a ``use`` becomes a class, and what is said when it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.contract import CONTRACT_VERSION, NoSettings
from headrace.errors import ConfigError, ContractError, PluginError
from headrace.registry import ROLES, PluginSpec, absolute, build, listing, load, require, settings_of

PLUGINS = str(Path(__file__).parents[2] / "small_plugins.py")
Install = Callable[..., None]

DIARY = """
from headrace.hooks import Observer

class Diary(Observer):
    pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with observers on the path: its metadata, and one module per source."""

    def install(name: str, entry_points: str = "", *, requires: str = "", **sources: str) -> None:
        site = tmp_path / name
        info = site / f"{name}-2.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n{requires}")
        (info / "entry_points.txt").write_text(f"[headrace.observer]\n{entry_points}\n")
        for module, source in sources.items():
            (site / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(str(site))

    return install


def test_a_name_is_an_entry_point_of_the_roles_group(install: Install) -> None:
    install("one", "diary = diary_one:Diary", diary_one=DIARY)
    cls = load("observer", "diary")
    assert (cls.__module__, cls.__name__) == ("diary_one", "Diary")


def test_nothing_is_imported_until_it_is_selected(install: Install) -> None:
    install("two", "diary = diary_two:Diary\nother = other_two:Other", diary_two=DIARY, other_two="1 / 0")
    assert {"diary", "other"} <= {item.name for item in listing("observer")}
    load("observer", "diary")
    assert "other_two" not in sys.modules


def test_a_class_is_named_by_its_module(install: Install) -> None:
    install("three", diary_three=DIARY)
    assert load("observer", "diary_three:Diary").__module__ == "diary_three"


def test_a_file_is_relative_to_the_job_and_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DIARY)
    cls = load("observer", "./mine.py:Diary", directory=str(tmp_path))
    assert load("observer", "mine.py:Diary", directory=str(tmp_path)) is cls
    assert load("observer", f"{tmp_path}/mine.py:Diary") is cls


def test_an_absolute_use_means_the_same_from_anywhere(tmp_path: Path) -> None:
    assert absolute("./mine.py:Diary", directory=str(tmp_path)) == f"{tmp_path}/mine.py:Diary"
    assert absolute("package.module:Diary", directory="x") == "package.module:Diary"
    assert absolute("console", directory="x") == "console"


def test_an_unknown_name_lists_what_is_installed_and_the_near_miss(install: Install) -> None:
    install("four", "diary = diary_four:Diary")
    with pytest.raises(
        PluginError, match=r"no observer named 'dairy'; installed: .*diary.*Did you mean 'diary'\?"
    ) as e:
        load("observer", "dairy", origin="run.toml:3")
    assert e.value.origin == "run.toml:3"
    assert e.value.fix == 'set use = "diary", or list candidates with: headrace plugins observer'


def test_a_name_offered_by_two_distributions_is_refused(install: Install) -> None:
    install("five", "diary = diary_five:Diary", diary_five=DIARY)
    install("six", "diary = diary_six:Diary", diary_six=DIARY)
    with pytest.raises(PluginError, match=r"more than once: five \(diary_five:Diary\), six \(diary_six:Diary\)") as e:
        load("observer", "diary")
    assert "uninstall all but one" in e.value.fix


@pytest.mark.parametrize("use", ["", ":", "module:", ":Class", "a b", "m:a.b", "m:C()", "./mine.py"])
def test_another_form_of_use_is_refused_with_the_three_forms(use: str) -> None:
    with pytest.raises(PluginError, match=r'a name, "module:Class" or "\./file\.py:Class"'):
        load("observer", use)


def test_a_missing_module_file_or_class_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="there is no module 'no_such_module'"):
        load("observer", "no_such_module.inner:Diary")
    with pytest.raises(PluginError, match=f"there is no Python file {tmp_path}/mine.py"):
        load("observer", "./mine.py:Diary", directory=str(tmp_path))
    with pytest.raises(PluginError, match=r"has no class 'Dairy'; it defines: .*Did you mean 'Diary'\?"):
        load("observer", f"{PLUGINS}:Dairy")


@pytest.mark.parametrize("source", ["1 / 0", "import headrace.no_such_room", "def f(:"])
def test_code_that_cannot_be_imported_is_wrapped_once(tmp_path: Path, source: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    for _ in range(2):
        with pytest.raises(PluginError, match=r"broken\.py cannot be imported: \w+Error"):
            load("observer", "./broken.py:Diary", directory=str(tmp_path))


def test_a_module_that_raises_is_wrapped_once(install: Install) -> None:
    install("seven", diary_seven="raise RuntimeError('no display')")
    with pytest.raises(PluginError, match="diary_seven cannot be imported: RuntimeError: no display"):
        load("observer", "diary_seven:Diary")


def test_an_absent_package_is_named_with_the_extra_that_brings_it(install: Install) -> None:
    requires = "Provides-Extra: ink\nRequires-Dist: no-such-ink>=3; extra == 'ink'\n"
    install("eight", "diary = diary_eight:Diary", requires=requires, diary_eight="import no_such_ink.colours")
    with pytest.raises(PluginError, match="module 'no_such_ink' is not installed") as caught:
        load("observer", "diary")
    assert caught.value.fix == 'pip install "eight[ink]"'


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("no-such-ink>=3", "needs no-such-ink>=3, which is not installed"),
        ("pytest>=1000", r"needs pytest>=1000, and finds \d"),
        ("pytest>=1", ""),
    ],
)
def test_an_extra_is_judged_by_what_is_installed(install: Install, requirement: str, message: str) -> None:
    requires = f"Provides-Extra: ink\nProvides-Extra: pen\nRequires-Dist: {requirement} ; extra == 'ink'\n"
    requires += "Requires-Dist: no-such-pen ; extra == 'pen'\n"
    install("nine", "diary = diary_nine:Diary [ink]", requires=requires, diary_nine=DIARY)
    assert load("observer", "diary").__name__ == "Diary"
    if message:
        with pytest.raises(PluginError, match=message) as caught:
            require("observer", "diary")
        assert caught.value.fix == 'pip install "nine[ink]"'
    else:
        require("observer", "diary")
    (listed,) = [item for item in listing("observer") if item.name == "diary"]
    assert (listed.target, listed.distribution, listed.version) == ("diary_nine:Diary", "nine", "2.5")
    assert bool(listed.missing) is bool(message)


def test_a_class_of_another_role_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match=r"cannot be the storage: that must be a class derived from .*\.Storage"):
        load("storage", f"{PLUGINS}:Diary")
    with pytest.raises(ContractError, match="cannot be the storage"):
        load("storage", f"{PLUGINS}:concrete")


def test_an_open_abstract_method_is_a_contract_error(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "from headrace.contract import Launcher\nclass Half(Launcher):\n    def other(self): ...\n"
    )
    with pytest.raises(ContractError, match="does not implement launch"):
        load("launcher", "./half.py:Half", directory=str(tmp_path))


def test_settings_must_be_a_dataclass(tmp_path: Path) -> None:
    (tmp_path / "loose.py").write_text(DIARY.replace("pass", "Settings = dict"))
    with pytest.raises(ContractError, match="Settings must be a dataclass"):
        load("observer", "./loose.py:Diary", directory=str(tmp_path))


def test_another_contract_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(DIARY.replace("pass", f"contract_version = {CONTRACT_VERSION + 1}"))
    with pytest.raises(PluginError, match=f"contract version {CONTRACT_VERSION + 1}, this is {CONTRACT_VERSION}"):
        load("observer", "./old.py:Diary", directory=str(tmp_path))


def test_an_unknown_role_is_a_programmers_error() -> None:
    with pytest.raises(ValueError, match="unknown role 'poet'"):
        load("poet", "x")


def test_a_spec_travels_and_builds_the_same_plugin() -> None:
    spec = PluginSpec(role="training_engine", use=f"{PLUGINS}:Trainer", settings={"learning_rate": 1, "betas": [0, 1]})
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=PluginSpec)
    assert received == spec
    plugin = build(received)
    assert (plugin.settings.learning_rate, plugin.settings.betas) == (1.0, (0.0, 1.0))


def test_settings_are_checked_by_type_and_name() -> None:
    cls = load("training_engine", f"{PLUGINS}:Trainer")
    with pytest.raises(ConfigError, match=r"learning_rate should be a valid number; .*unknown key 'beta'") as caught:
        settings_of(cls, {"learning_rate": "0.1", "beta": 1}, origin="run.toml:9")
    assert caught.value.origin == "run.toml:9"


def test_a_plugin_without_settings_takes_none() -> None:
    cls = load("storage", f"{PLUGINS}:Dictionary")
    assert settings_of(cls, {}) == NoSettings()
    with pytest.raises(ConfigError, match="unknown key 'size'; known here: none"):
        settings_of(cls, {"size": 1})


def test_every_role_has_a_base_class_and_can_be_listed() -> None:
    assert {item.role for item in listing()} <= set(ROLES)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("        path: 'NoSuchType'", "PydanticUserError: .*NoSuchType"),
        ("        pages: int = 0\n        def __post_init__(self): raise KeyError('pages')", "KeyError: 'pages'"),
    ],
)
def test_settings_that_cannot_be_validated_are_the_plugins_fault(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "vague.py").write_text(
        "from dataclasses import dataclass\nfrom headrace.hooks import Observer\n"
        f"class Vague(Observer):\n    @dataclass(frozen=True)\n    class Settings:\n{body}\n"
    )
    cls = load("observer", "./vague.py:Vague", directory=str(tmp_path))
    with pytest.raises(ContractError, match=f"settings of Vague cannot be validated: ({message})"):
        settings_of(cls, {})
