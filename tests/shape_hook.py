"""The type checker behind the shape annotations: jaxtyping's import hook applies it to all of gblr during tests."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_CONF = BeartypeConf(is_pep484_tower=True)  # an int will do where a float is asked for, as for mypy
_WRAPPER_FILE = jaxtyping.jaxtyped.__code__.co_filename


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype; a function with a hint that it cannot check (`Self` in a lone method, a plain Protocol) stays as is."""
    try:
        return beartype(function, conf=_CONF)
    except BeartypeDecorHintException:
        return function


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """gblr as its users run it: without the wrappers, which answer wrong shapes before our own ValueErrors can, and
    which `torch.compile` does not trace.

    A switched-off wrapper around a function is traced well; one around a method of an object made inside the graph is
    not, so those are taken off.
    """
    taken_off = [
        (cls, name, member, bare)
        for cls in _classes_of_gblr()
        for name, member in list(vars(cls).items())
        if (bare := _bare(member)) is not member
    ]
    jaxtyping.config.update("jaxtyping_disable", True)
    for cls, name, _, bare in taken_off:
        setattr(cls, name, bare)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
        for cls, name, member, _ in taken_off:
            setattr(cls, name, member)


def _classes_of_gblr() -> set[type]:
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "gblr"]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {cls for cls in classes if cls.__module__.split(".")[0] == "gblr"}


def _bare(member: Any) -> Any:
    """The function, property or class method under jaxtyping's wrapper; the member itself where there is none."""
    if isinstance(member, property) and (getter := _bare(member.fget)) is not member.fget:
        return property(getter, member.fset, member.fdel)
    if isinstance(member, (classmethod, staticmethod)) and (inner := _bare(member.__func__)) is not member.__func__:
        return type(member)(inner)
    if isinstance(member, FunctionType) and member.__code__.co_filename == _WRAPPER_FILE:
        return member.__wrapped__
    return member
