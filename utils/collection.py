"""The YAML files of the FedAvg / FedNova / FedProx / SCAFFOLD collection, as our options.

There all clients take part in every round, local work is counted in passes over a client's data,
the official train part is dealt to the clients class by class with nothing held out, one seed fixes
that and everything else, and the official test part judges the global model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml

from FLAlgorithms.trainmodel import models
from utils.config import yaml_items, yaml_text
from utils.errors import InputError
from utils.model_utils import DATASETS


def _same(text: str, given: dict[str, str]) -> str:
    return text


def _dataset(text: str, given: dict[str, str]) -> str:
    names = {name.lower(): name for name in DATASETS}
    if text.lower() == "emnist":
        raise ValueError(f"one of {', '.join(n for n in DATASETS if n.startswith('Emnist'))}")
    return names.get(text.lower().replace("-", ""), text)


def _model(text: str, given: dict[str, str]) -> str:
    return models.ALIASES.get(text, text)


def _partition(text: str, given: dict[str, str]) -> str:
    if text != "-1" and not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError("-1 (all classes, iid) or a whole number >= 1")
    scheme, labels = ("iid", "") if text == "-1" else ("round_robin", f",labels_per_user={text}")
    return f"{scheme}:users={given['num_client']}{labels},seed={given['i_seed']},pool=train,test=0"


# {section: {key: (our option, its text from this key's text and all of them)}}
KEYS: dict[str, dict[str, tuple[str, Callable[[str, dict[str, str]], str]]]] = {
    "system": {
        "num_client": ("numusers", _same),
        "i_seed": ("seed", _same),
        "num_local_class": ("partition", _partition),
        "dataset": ("dataset", _dataset),
        "model": ("model", _model),
        "num_round": ("num_global_iters", _same),
        "res_root": ("results_dir", _same),
    },
    "client": {
        "fed_algo": ("algorithm", _same),
        "lr": ("learning_rate", _same),
        "batch_size": ("batch_size", _same),
        "num_local_epoch": ("local_epochs", _same),
        "momentum": ("momentum", _same),
        "mu": ("mu", _same),
    },
}
OPTIONAL = ("res_root", "momentum", "mu")
ALWAYS = {"local_unit": "epochs", "test_set": "global"}
# No loader is there to be fed by processes.
WITHOUT_EFFECT = {"system": (), "client": ("num_worker",)}


def translate(
    sections: Sequence[tuple[yaml.Node, yaml.Node]], where: str, tell: Callable[[str], None]
) -> dict[str, tuple[str, str]]:
    """{our option: (its text, the key it comes from)} of the sections of a file, by their nodes.

    Raises InputError, starting with `where`, for what is unknown, missing or there twice; `tell`
    gets a notice of what has no effect.
    """
    given: dict[str, str] = {}
    for name, section in sections:
        allowed = [*KEYS[name.value], *WITHOUT_EFFECT[name.value]]
        items = yaml_items(section, allowed, where, name.value)
        if twice := items.keys() & given.keys():  # where the section itself is there twice
            raise InputError(f"{where}: {min(twice)} is given twice")
        given |= {key: yaml_text(key, value, where) for key, value in items.items()}
    found = {option: (text, option) for option, text in ALWAYS.items()}
    for section, keys in KEYS.items():
        for key, (option, convert) in keys.items():
            if key in given:
                try:
                    found[option] = (convert(given[key], given), key)
                except ValueError as error:
                    raise InputError(f"{where}: {key} {given[key]!r}: not {error}") from None
            elif key not in OPTIONAL:
                raise InputError(f"{where}: {section} lacks {key}")
        for key in WITHOUT_EFFECT[section]:
            if key in given:
                tell(f"notice: {where}: {key} has no effect; there is no loader to feed")
    return found
