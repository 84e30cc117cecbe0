"""The ctypes declarations are held against the library that is loaded."""

import ctypes

import grpc
import pytest

import superoffload
from superoffload._core import library, structures


@pytest.fixture
def load():
    """Loads the library once more, with what was planted; no module keeps that one."""
    return library._library.__wrapped__


def test_its_structs_and_functions_are_those_declared(load):
    load()


@pytest.mark.parametrize("name", sorted(structures.BY_NAME))
def test_a_struct_of_another_size_is_refused(monkeypatch, load, name):
    class Longer(structures.BY_NAME[name]):
        _fields_ = [("more", ctypes.c_uint64)]

    monkeypatch.setitem(structures.BY_NAME, name, Longer)
    with pytest.raises(superoffload.Error, match=f"{name} has .* bytes.*one version") as raised:
        load()
    assert raised.value.code == grpc.StatusCode.FAILED_PRECONDITION


def test_every_struct_is_compared():
    declared = {value for value in vars(structures).values() if isinstance(value, type)}
    assert {value for value in declared if issubclass(value, ctypes.Structure)} == set(structures.BY_NAME.values())


def test_a_function_that_is_not_there_is_refused(monkeypatch, load):
    monkeypatch.setitem(library._FUNCTIONS, "of_the_next_version", (ctypes.c_int, []))
    with pytest.raises(superoffload.Error, match="has no superoffload_of_the_next_version"):
        load()
