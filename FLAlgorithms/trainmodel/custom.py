"""`--model FILE.py:Class`: a model of the user's own.

The class takes (shape, classes): the shape of one sample and the number of classes, and optionally
`norm`; it returns logits (batch, classes). A run records FILE.py:Class@HASH, the hash of the parsed
file: comments and layout do not count. A file whose code has changed since then is refused. Older
runs recorded the hash of the bytes, which is accepted as well.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from FLAlgorithms.trainmodel.classifier import Classifier, with_loss
from utils.errors import InputError
from utils.files import is_foreign


class _Guest:
    """Mixed into a custom model: what it gets is its own, what it raises is told in one line."""

    # Evaluation passes views of the data, and several gradients are taken on one minibatch: what
    # the model writes into its argument (an activation in place) must reach neither.

    def __call__(self, x: Tensor) -> object:
        with told(type(self).__name__, "in its forward pass"):
            return super().__call__(x.clone())

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().loss(logits, y.clone())

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().correct(logits.clone(), y.clone())


def is_custom(name: str) -> bool:
    """Whether a model's name has the form FILE.py:Class or FILE.py:Class@HASH."""
    path, _, rest = name.rpartition(":")
    return path.endswith(".py") and rest.partition("@")[0].isidentifier()


def label(name: str) -> str:
    """How files, figures and messages call a model: a custom one by its class."""
    return _parts(name)[1] if is_custom(name) else name


def file_hash(name: str) -> str:
    """The hash that the name of a model carries; empty without."""
    return _parts(name)[2] if is_custom(name) else ""


def whole(name: str) -> str:
    """A custom model's name with its file's whole path, unless that is of another system."""
    path, _, rest = name.rpartition(":")
    return name if is_foreign(path) else f"{Path(path).resolve()}:{rest}"


def pinned(name: str) -> str:
    """A custom model's name with the hash of its file; any other name as it is."""
    if not is_custom(name):
        return name
    path, kind, _ = _parts(name)
    return f"{path}:{kind}@{_module(name).__name__.rpartition('_')[2]}"


def load_class(name: str) -> type[Classifier]:
    """The class of a custom model, with Classifier's loss; raises InputError."""
    path, wanted, _ = _parts(name)
    module = _module(name)
    kind = getattr(module, wanted, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        there = [
            n
            for n, v in vars(module).items()
            if isinstance(v, type) and issubclass(v, nn.Module) and v.__module__ == module.__name__
        ]
        what = "has no class" if kind is None else "has no torch.nn.Module class"
        found = f"; there are {', '.join(there)}" if there else ""
        raise InputError(f"--model {path}: {what} {wanted}{found}")
    try:
        inspect.signature(kind).bind((1, 1, 1), 2)
    except (TypeError, ValueError):
        raise InputError(f"--model {path}: {wanted} must take (shape, classes)") from None
    return type(kind.__name__, (_Guest, with_loss(kind)), {})


@contextmanager
def told(name: str, where: str) -> Iterator[None]:
    """Tell an exception of the model's own code in one line."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__} {where}: {error}"
        raise InputError(f"--model {label(name)}: {what}") from error


def build(name: str, *arguments: object, **options: object) -> Classifier:
    """The model that a custom class makes."""
    kind = load_class(name)
    with told(name, "when it is built"):
        return kind(*arguments, **options)


def _parts(name: str) -> tuple[str, str, str]:
    """File, class, hash (empty if not given)."""
    path, _, rest = name.rpartition(":")
    kind, _, digest = rest.partition("@")
    return path, kind, digest


def _module(name: str) -> types.ModuleType:
    """The file as a module, run once per content."""
    path, _, digest = _parts(name)
    stem = Path(path).stem
    # A run keeps the model it was started with, whatever happens to the file meanwhile.
    if digest and f"{stem}_{digest}" in sys.modules:
        return sys.modules[f"{stem}_{digest}"]
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"--model {path}: {error.strerror}") from None
    with told(name, "when the file is read"):
        tree = ast.parse(content, path)
        found = _short(repr(_code(tree)).encode())
    if digest not in ("", found, _short(content)):
        raise InputError(f"--model {path}: has changed (hash {found}, recorded {digest})")
    key = f"{stem}_{digest or found}"
    if key not in sys.modules:
        module = types.ModuleType(key)
        module.__file__ = path
        # Known by name while it runs: dataclasses and pickle look it up there.
        sys.modules[key] = module
        try:
            with told(name, "when the file is read"), torch.random.fork_rng(devices=[]):
                exec(compile(tree, path, "exec"), module.__dict__)
        except InputError:
            del sys.modules[key]
            raise
    return sys.modules[key]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _code(node: object) -> object:
    """A syntax tree as nested tuples.

    Fields that say nothing are left out: versions of Python differ in which of these there are.
    """
    if isinstance(node, ast.AST):
        fields = [(name, _code(value)) for name, value in ast.iter_fields(node)]
        return (type(node).__name__, *(field for field in fields if field[1] not in (None, ())))
    return tuple(map(_code, node)) if isinstance(node, list) else node
