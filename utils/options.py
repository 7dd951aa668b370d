"""Options: what a text or a value must be, and how an algorithm declares one of its own.

new_options = {"ditto_lamda": option(0.1, STEP, "strength of the pull of w on v")}
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from utils.errors import InputError
from utils.files import is_foreign

Parse = Callable[[str], object]


class Number:
    """Parses a number within [low, high]; `above` excludes low itself."""

    def __init__(self, kind: type, low: float, high: float = math.inf, above: bool = False) -> None:
        self.kind, self.low, self.high, self.above = kind, low, high, above
        name = "a whole number" if kind is int else "a number"
        limit = f"> {low:g}" if above else f">= {low:g}"
        self.says = f"{name} {limit}" + (f" and <= {high:.9g}" if high < math.inf else "")

    def __call__(self, text: str) -> float:
        value = self.kind(text)
        low_enough = value > self.low if self.above else value >= self.low
        if not (math.isfinite(value) and low_enough and value <= self.high):
            raise ValueError(text)
        return value


class Choice:
    """Parses one of some names."""

    def __init__(self, names: Collection, more: str = "") -> None:
        """`names` is looked at anew each time; `more`: what else a subclass takes."""
        self._known, self._more = names, more

    @property
    def names(self) -> dict[str, object]:
        """The values by their text."""
        return {str(n): n for n in self._known}

    @property
    def says(self) -> str:
        """What is valid."""
        return "one of " + ", ".join(self.names) + self._more

    def __call__(self, text: str) -> object:
        if text not in self.names:
            raise ValueError(text)
        return self.names[text]

    def hint(self, text: str) -> str:
        """The nearest valid name, as a question; empty if none is near."""
        lower = {name.lower(): name for name in self.names}
        near = difflib.get_close_matches(text.lower(), lower, n=1, cutoff=0.5)
        return f"; did you mean {lower[near[0]]}?" if near else ""


class Flag:
    """A switch without a value on the command line, true or false in YAML."""

    says = "true or false"

    def __call__(self, text: str) -> bool:
        return {"true": True, "false": False}[text.lower()]


class Text:
    """Any text that is not empty."""

    says = "a name or path"

    def __call__(self, text: str) -> str:
        if not text or "\0" in text:
            raise ValueError(text)
        text.encode()  # a lone surrogate is no text
        return text


class Auto(Number):
    """`auto` or a whole number >= 0."""

    def __init__(self) -> None:
        super().__init__(int, 0, 10**6)
        self.says = f"auto or {self.says}"

    def __call__(self, text: str) -> object:
        return text if text == "auto" else super().__call__(text)


class Device(Number):
    """The number of a CUDA device, or -1."""

    def __init__(self) -> None:
        super().__init__(int, -1, 10**6)

    def hint(self, text: str) -> str:
        """What torch's name of a device is here."""
        kind, _, index = text.lower().partition(":")
        numbers = {"cpu": "-1", "cuda": index or "0", "gpu": index or "0"}
        return f"; did you mean {numbers[kind]} ({text})?" if kind in numbers else ""


class Range(Number):
    """Two whole numbers LO HI, both >= 1: `2 5` or `[2, 5]`."""

    def __init__(self) -> None:
        super().__init__(int, 1, 10**7)
        self.says = f"two whole numbers LO HI with 1 <= LO <= HI <= {self.high}"

    def __call__(self, text: str) -> tuple[int, int]:
        plain = text.removeprefix("[").removesuffix("]").replace(",", " ")
        low, high = map(super().__call__, plain.split())
        if low > high:
            raise ValueError(text)
        return low, high


class WholePath(Text):
    """A path, kept whole, so that a recorded run can be repeated from elsewhere."""

    def __call__(self, text: str) -> str:
        text = super().__call__(text)
        return text if is_foreign(text) else str(Path(text).resolve())


STEP = Number(float, 0)
COUNT = Number(int, 1, 10**9)


def option(default: object, parse: Parse, text: str) -> dataclasses.Field:
    """A Config field: its default, who reads its text, and a line of help."""
    return dataclasses.field(default=default, metadata={"parse": parse, "help": text})


def parse_text(field: dataclasses.Field, text: str, where: str) -> object:
    """An option's text as its value; `where` says how the user spelled the option.

    Raises InputError naming the value and what is valid.
    """
    parse = field.metadata["parse"]
    try:
        return parse(text)
    except (ValueError, KeyError, OverflowError):
        raise _not_valid(parse, text, where) from None


def checked(field: dataclasses.Field, value: object, where: str) -> object:
    """A value from Python, judged by the parser of its text; raises InputError.

    A whole number becomes a float where the option is one, numpy's numbers Python's, a path text.
    """
    value = value.item() if isinstance(value, np.generic) else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is None and field.default is None:
        return None
    parse = field.metadata["parse"]
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    try:
        parsed = parse(text)
    except (ValueError, KeyError, OverflowError):
        raise _not_valid(parse, value, where) from None
    if type(parsed) is type(value) or (type(parsed) is float and type(value) is int):
        return parsed
    raise _not_valid(parse, value, where)


def _not_valid(parse: Parse, value: object, where: str) -> InputError:
    hint = parse.hint(value) if hasattr(parse, "hint") and isinstance(value, str) else ""
    return InputError(f"{where} {value!r}: not {parse.says}{hint}")
