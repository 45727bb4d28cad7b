"""Print the public names of the CuPy that this process finds, with their parameters, as JSON.

With ``--own`` only what a module defines or lists in ``__all__``, not what it imports for itself,
and also what its classes annotate. Exits with 3 where there is no CuPy. Functions of Cython have
their signature in the first line of their docstring.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import types
import warnings
from typing import Any

MODULES = (
    *("", "cuda", "cuda.runtime", "cuda.memory", "cuda.pinned_memory", "cuda.stream"),
    *("cuda.device", "cuda.nccl"),
)
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def main() -> None:
    warnings.simplefilter("ignore")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        sys.exit(3)
    names: dict[str, Any] = {}
    for module in MODULES:
        try:
            found = importlib.import_module(f"cupy.{module}".rstrip("."))
        except ImportError:  # the library of nccl may be absent
            continue
        for name in own(found) if "--own" in sys.argv else public(found):
            value = getattr(found, name)
            if isinstance(value, types.ModuleType) or name == "annotations":
                continue
            place = f"{module}.{name}".lstrip(".")
            names[place] = describe(value)
            if inspect.isclass(value):
                names[place]["doc"] = value.__doc__ or ""
                for attribute in annotated(value) if "--own" in sys.argv else ():
                    names[f"{place}.{attribute}"] = describe(None)
                for attribute in public(value):
                    member = inspect.getattr_static(value, attribute)
                    names[f"{place}.{attribute}"] = describe(getattr(value, attribute), member)
    print(json.dumps({"__version__": cupy.__version__, "names": names}))


def public(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def own(module: Any) -> list[str]:
    """What a module means to offer."""
    values = {name: getattr(module, name) for name in public(module)}
    home = module.__name__
    defined = [n for n, value in values.items() if getattr(value, "__module__", home) == home]
    return sorted({*defined, *getattr(module, "__all__", ())})


def annotated(kind: type) -> set[str]:
    """Attributes of a class's objects."""
    names = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return {name for name in names if not name.startswith("_")}


def describe(value: Any, member: Any = None) -> dict[str, Any]:
    # Attributes that Cython stores without a docstring, and properties, are not called.
    called = callable(value) and not isinstance(member, (property, types.GetSetDescriptorType))
    return {
        "callable": called,
        "value": value if isinstance(value, int) else None,
        "parameters": parameters(value) if called else None,
    }


def parameters(function: Any) -> list[dict[str, Any]] | None:
    """Name, kind and default of each parameter, or None where nothing tells them."""
    found = from_docstring(function)
    if found is None:
        try:
            found = inspect.signature(function)
        except (TypeError, ValueError):
            return None
    return [
        {
            "name": each.name,
            "kind": KINDS[each.kind],
            "default": None if each.default is each.empty else str(each.default),
        }
        for each in found.parameters.values()
        if each.name not in ("self", "cls")
    ]


def from_docstring(function: Any) -> inspect.Signature | None:
    """The signature that Cython writes into docstrings, without its types of C."""
    text = (getattr(function, "__doc__", None) or "").lstrip().partition("\n")[0]
    name = getattr(function, "__name__", "")
    match = re.match(rf"(?:\w+\.)*(?:{re.escape(name)}|__init__)\((.*)\)(?: -> .*)?$", text)
    if match is None:
        return None
    # "size_t size", "str name=u''" and "tuple max_version=None" lose their first word.
    plain = re.sub(r"(?:\w+ )+(\w+)(?=[,=)]|$)", r"\1", match.group(1)).replace("\\*", "*")
    plain = re.sub(r"=u'", "='", plain)
    try:
        node = ast.parse(f"def function({plain}): pass").body[0]
    except SyntaxError:
        return None
    assert isinstance(node, ast.FunctionDef)
    return signature_of(node.args)


def signature_of(args: ast.arguments) -> inspect.Signature:
    def default(node: ast.expr | None) -> Any:
        if node is None:
            return inspect.Parameter.empty
        try:
            return ast.literal_eval(node)
        except ValueError:  # a name: not to be compared
            return _Unknown()

    kind = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=default(value))
        for each, value in zip(positional, defaults, strict=True)
    ]
    if args.vararg:
        found.append(kind(args.vararg.arg, kind.VAR_POSITIONAL))
    found += [
        kind(each.arg, kind.KEYWORD_ONLY, default=default(value))
        for each, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        found.append(kind(args.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found)


class _Unknown:
    def __str__(self) -> str:
        return "?"


if __name__ == "__main__":
    main()
