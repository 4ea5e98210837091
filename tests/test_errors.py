"""The exception tree: sentences, fields, codes, and the way over a socket."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import weightcached
from weightcached import errors
from weightcached.errors import (
    BY_CODE,
    ConfigError,
    DeviceFull,
    KeyMismatch,
    ModelLoading,
    NoSuchModel,
    ServiceNotRunning,
    WeightCacheError,
    from_wire,
    to_wire,
)

CLASSES = sorted(BY_CODE.values(), key=lambda cls: cls.__name__)
FULL = {
    "device": "host-0", "needed": 300, "free": 100, "evictable": 200, "limit": 1000, "others": 0,
    "holders": ["minilm 200", "other 500"], "advice": "evict a model or raise memory_limit",
}  # fmt: skip


def documented_fields(cls: type[WeightCacheError]) -> list[str]:
    """The names in the class's "Fields: a, b (what b is)." line, or of the nearest base that has one."""
    for base in cls.__mro__:
        if match := re.search(r"Fields: (.*?)\.(?: |$)", inspect.cleandoc(base.__doc__ or "").replace("\n", " ")):
            names = match[1]
            while (plain := re.sub(r"\([^()]*\)", "", names)) != names:  # innermost brackets first
                names = plain
            return [name.strip() for name in names.split(",")]
    return ["problem"]


def sample(name: str) -> Any:
    """A value of the kind that the field has."""
    numbers = {"pid": 4242, "uid": 1000, "seconds": 1.5, "progress": 0.41, "needed": 3, "free": 2, "limit": 9}
    lists = {"known": ["a", "b"], "allowed": [0, 1000], "holders": ["pid 42 (python), 90000000 bytes"]}
    return {**numbers, **lists, "differences": {"dtype": ["bfloat16", "float32"]}}.get(name, f"the-{name}")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_documented_fields_make_the_sentence(cls: type[WeightCacheError]) -> None:
    """With the fields its docstring names, each class's sentence is whole and shows every one of them that it uses."""
    fields = {name: sample(name) for name in documented_fields(cls)}

    sentence = str(cls(**fields))

    used = re.findall(r"\{(\w+)[:}]", cls.sentence)
    assert set(used) <= set(fields), "the sentence uses a field that the docstring does not name"
    assert not sentence.startswith(f"{cls.code}: {{"), sentence
    for name in used:
        shown = {"progress": "41%", "differences": "dtype ['bfloat16', 'float32']"}.get(name)
        for part in [shown] if shown else fields[name] if isinstance(fields[name], list) else [fields[name]]:
            assert str(part) in sentence


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_wire_unchanged(cls: type[WeightCacheError]) -> None:
    """Class, fields and sentence are the same after a trip through JSON."""
    error = cls(**{name: sample(name) for name in documented_fields(cls)})

    arrived = from_wire(json.loads(json.dumps(to_wire(error))))

    assert type(arrived) is cls
    assert arrived.fields == error.fields
    assert str(arrived) == str(error)
    assert arrived.exit_code == error.exit_code


def test_codes_are_unique_and_the_tree_is_whole() -> None:
    """Every class of the module has a wire code of its own, stands in the table, and is exported at the top."""
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, WeightCacheError)}

    assert set(BY_CODE.values()) == classes
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        assert getattr(weightcached, cls.__name__) is cls
        assert cls.__name__ in weightcached.__all__


def test_the_drawn_tree_is_the_tree() -> None:
    """The drawing at the top of the module lists exactly the classes, each below its base."""
    drawn: dict[str, str | None] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^    ((?:[│├└─ ]{4})*)(\w+)(?:\s{2,}|$)", line):
            depth, name = len(match[1]) // 4, match[2]
            stack = [entry for entry in stack if entry[0] < depth]
            drawn[name] = stack[-1][1] if stack else None
            stack.append((depth, name))

    assert drawn == {
        cls.__name__: None if cls is WeightCacheError else cls.__base__.__name__ for cls in CLASSES if cls.__base__
    }


def test_exit_codes_are_the_published_ones() -> None:
    """3 not running, 4 no such thing, 5 in use, 75 lock held, 78 bad config; everything else is 1."""
    expected = {
        "service-not-running": 3,
        "no-such-device": 4,
        "wrong-device": 4,
        "no-such-model": 4,
        "model-not-loaded": 4,
        "model-elsewhere": 4,
        "other-content": 4,
        "digest-pending": 4,
        "model-in-use": 5,
        "lock-held": 75,
        "bad-config": 78,
    }

    assert {code: cls.exit_code for code, cls in BY_CODE.items() if cls.exit_code != 1} == expected


def test_fields_are_attributes() -> None:
    """A field reads as an attribute; a name that is no field is an AttributeError that says so."""
    error = DeviceFull(**FULL)

    assert error.needed == 300
    assert error.holders == ["minilm 200", "other 500"]
    with pytest.raises(AttributeError, match="DeviceFull has no field 'wanted'"):
        _ = error.wanted
    assert not hasattr(error, "__notes__")


def test_lists_and_nothing_read_as_words() -> None:
    """Lists are joined, an empty list and None become "none"."""
    assert str(NoSuchModel(model="x", device="host-0", known=["a", "b"])) == "no model x on host-0; there: a, b"
    assert str(NoSuchModel(model="x", device="host-0", known=[])) == "no model x on host-0; there: none"
    assert str(ConfigError(file=None, problem="no models")) == "none: no models"


def test_a_key_mismatch_lists_every_field_with_both_values() -> None:
    """Two differing fields give two pairs in one sentence."""
    error = KeyMismatch(model="m", differences={"dtype": ["bfloat16", "float32"], "revision": ["b", None]})

    assert "dtype ['bfloat16', 'float32'], revision ['b', None]" in str(error)


def test_an_unknown_code_becomes_the_root_class_with_the_peers_sentence() -> None:
    """A newer peer's error is still readable."""
    error = from_wire({"code": "invented-later", "fields": {"x": 1}, "message": "the sentence of later"})

    assert type(error) is WeightCacheError
    assert str(error) == "the sentence of later"


@pytest.mark.parametrize("fields", [None, [], "text", 3])
def test_fields_that_are_no_object_keep_the_message(fields: object) -> None:
    """A broken error reply still gives the sentence that came with it."""
    assert str(from_wire({"code": "bad-config", "fields": fields, "message": "as sent"})) == "as sent"
    assert str(from_wire({})) == "an error without a message"


@pytest.mark.parametrize("fields", [{}, {"model": "m"}, {"self": 1, "cls": 2}, {"problem": {"deep": []}}])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_peers_other_fields_never_break_the_sentence(cls: type[WeightCacheError], fields: dict[str, Any]) -> None:
    """Missing fields, or ones named like Python's own parameters, give text, not an exception."""
    error = from_wire({"code": cls.code, "fields": fields, "message": ""})

    assert type(error) is cls
    assert str(error)


def test_a_peer_that_sends_no_command_is_readable() -> None:
    """A version that did not send the command to start the service had this one in its sentence."""
    error = from_wire({"code": "service-not-running", "fields": {"path": "/p"}, "message": ""})

    assert str(error) == "no service answers at /p; start it: systemctl --user start weightcached@INSTANCE"
    assert error.fields == {"path": "/p"}
    assert str(ServiceNotRunning(path="/p", start="do it")) == "no service answers at /p; start it: do it"


def test_a_field_of_another_type_never_breaks_the_sentence() -> None:
    """A progress that is no number does not fit "{progress:.0%}"; the fields are shown instead."""
    error = ModelLoading(model="m", device="d", progress=None)

    assert str(error).startswith("model-loading: {'model': 'm'")


def test_a_path_among_the_fields_crosses_as_text() -> None:
    """What JSON does not have becomes its text, so that an error reply never fails itself."""
    sent = to_wire(ConfigError(file=Path("/etc/weightcached/model.toml"), problem="p"))

    assert sent["fields"] == {"file": "/etc/weightcached/model.toml", "problem": "p"}
    assert from_wire(json.loads(json.dumps(sent))).fields == sent["fields"]


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_class_and_fields(remake: Any) -> None:
    """copy, deepcopy and a process pool's pickle rebuild the error; `__getattr__` does not recurse on the way."""
    error = DeviceFull(**FULL)

    other = remake(error)

    assert type(other) is DeviceFull
    assert other.fields == error.fields
    assert str(other) == str(error)


def test_an_instance_without_its_constructor_has_no_fields() -> None:
    """Half-made objects, as copy protocols make them, answer AttributeError and do not recurse for ever."""
    with pytest.raises(AttributeError):
        _ = DeviceFull.__new__(DeviceFull).needed


def test_every_raise_in_the_package_gives_the_documented_fields() -> None:
    """Each place that makes an error passes at least the fields its class documents: no sentence has a hole."""
    names = {cls.__name__: set(documented_fields(cls)) for cls in CLASSES if cls is not WeightCacheError}
    wrong = []
    package = Path(errors.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                given = {keyword.arg for keyword in node.keywords}
                if None not in given and (not names[node.func.id] <= given or node.args):
                    place = f"{path.relative_to(package)}:{node.lineno}"
                    wrong.append(f"{place} {node.func.id}({', '.join(sorted(map(str, given)))})")

    assert not wrong


def test_repr_has_the_sentence() -> None:
    """Logs that print an error by its repr keep what it says."""
    assert repr(WeightCacheError(problem="so it is")) == "WeightCacheError('so it is')"
