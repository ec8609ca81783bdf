"""The type checker behind the shape annotations: jaxtyping's import hook applies it to all of gblr during tests."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import jaxtyping
from jaxtyping._storage import pop_shape_memo, push_shape_memo

try:
    from beartype import BeartypeConf, beartype
    from beartype.roar import BeartypeCallHintParamViolation, BeartypeDecorHintException
except ModuleNotFoundError:  # on a machine with a GPU, say, where nothing can be installed
    CHECKED = False
else:
    CHECKED = True
    _CONF = BeartypeConf(is_pep484_tower=True)  # an int will do where a float is asked for, as for mypy
_slow_jaxtyped = jaxtyping.jaxtyped
_WRAPPER_FILES = {_slow_jaxtyped.__code__.co_filename, __file__}


def install(package: str) -> None:
    """Checks all of `package` from its first import on, where beartype is installed."""
    if not CHECKED:
        return
    jaxtyping.install_import_hook(package, f"{__name__}.checked")
    jaxtyping.jaxtyped = jaxtyped  # the hook has every module look it up there


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype; a function with a hint that it cannot check (`Self` in a lone method, a plain Protocol) stays as is."""
    try:
        return beartype(function, conf=_CONF)
    except BeartypeDecorHintException:
        return function


def jaxtyped(target: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """The checks of `jaxtyping.jaxtyped` in half the time: it matches arguments to names in Python at every call,
    and checks them again beside the result.

    Left to jaxtyping are sizes that arguments give, as in "k {length}"; names of types in quotes, which may be imported
    for type checkers alone; what beartype refuses as a whole, as arguments can still be checked if only the result is
    refused; and arguments that turned out wrong, for its message.
    """
    if target is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if target.__module__.endswith(".triton"):
        return target  # Triton reads the source of its kernels: a wrapper would be compiled in their place
    if isinstance(target, type):
        made = target.__dict__.get("__init__")
        if dataclasses.is_dataclass(target) and made is not None and made is _bare(made):
            target.__init__ = jaxtyped(made, typechecker=typechecker)
        return target
    if any(isinstance(hint, str) or "{" in str(hint) for hint in target.__annotations__.values()):
        return _slow_jaxtyped(target, typechecker=typechecker)
    try:
        quick = beartype(target, conf=_CONF)
    except BeartypeDecorHintException:
        return _slow_jaxtyped(target, typechecker=typechecker)

    @functools.wraps(target)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return target(*args, **kwargs)
        # What names of axes stand for, in this call; a `with` statement would not be traced by `torch.compile`.
        push_shape_memo({})
        try:
            return quick(*args, **kwargs)
        except BeartypeCallHintParamViolation:
            return _slow_jaxtyped(target, typechecker=typechecker)(*args, **kwargs)
        finally:
            pop_shape_memo()

    return wrapper


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
    if isinstance(member, FunctionType) and member.__code__.co_filename in _WRAPPER_FILES:
        return member.__wrapped__
    return member
