"""One frozen Config, filled by command line and YAML; a field carries default, help and parser."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from FLAlgorithms.servers import ALGORITHMS
from FLAlgorithms.trainmodel.custom import is_custom, whole
from FLAlgorithms.trainmodel.models import MODELS
from FLAlgorithms.trainmodel.vision import NORMS
from utils.errors import InputError, Parser
from utils.model_utils import (
    DATASETS,
    NORMALIZE,
    dataset_name,
    default_partition,
    is_file,
    is_folder,
)
from utils.options import (
    COUNT,
    STEP,
    Auto,
    Choice,
    Device,
    Flag,
    Number,
    Range,
    Text,
    WholePath,
    checked,
    option,
    parse_text,
)
from utils.schemes import Partition, parse

SEMANTICS: dict[str, dict[str, object]] = {
    "paper": {
        "inner_weight_decay": 0.0,
        "theta_start": "cold",
        "weighting": "samples",
        "personal": "theta",
        "batches": "shuffled",
        "peravg_update": "restore",
        "adapt": "train",
        "shared_init": "no",
    },
    "authors": {
        "inner_weight_decay": 0.001,
        "theta_start": "warm",
        "weighting": "samples",
        "personal": "local",
        "batches": "cyclic",
        "peravg_update": "restore",
        "adapt": "test_test",
        "shared_init": "yes",
    },
}
SEMANTICS["authors2020"] = SEMANTICS["authors"] | {
    "peravg_update": "two_step",
    "adapt": "test_train",
}
SWITCHES = tuple(SEMANTICS["paper"])


class _Model(Choice):
    """Parses the name of a model, or FILE.py:Class."""

    def __init__(self) -> None:
        super().__init__(MODELS, ", or FILE.py:Class")

    def __call__(self, text: str) -> str:
        return whole(Text()(text)) if is_custom(text) else super().__call__(text)


# What others call some datasets; difflib would take these for other ones.
OTHER_NAMES = {
    "femnist": "EmnistByclass (with --split FOLDER for LEAF)",
    "emnist": " or ".join(name for name in DATASETS if name.startswith("Emnist")),
}


class _Dataset(Choice):
    """Parses a dataset's name, or the path of a file of arrays."""

    def __init__(self) -> None:
        super().__init__(DATASETS, ", or a FILE.npz, or a FOLDER of LEAF JSON")

    def __call__(self, text: str) -> object:
        path = is_file(text) or is_folder(text)
        return WholePath()(text) if path else super().__call__(text)

    def hint(self, text: str) -> str:
        """The set that is meant, also by the name of a family of which there are several."""
        known = OTHER_NAMES.get(text.lower())
        return f"; did you mean {known}?" if known else super().hint(text)


class _Partition(Text):
    """A scheme and its arguments; what is wrong with them is told in full."""

    def __call__(self, text: str) -> str:
        parse(text)
        return super().__call__(text)


def _declared() -> dict[str, dataclasses.Field]:
    """The options that algorithms declare in their own files; one that two read is one object."""
    found: dict[str, dataclasses.Field] = {}
    for algorithm, cls in ALGORITHMS.items():
        for name, field in cls.new_options.items():
            if found.setdefault(name, field) is not field:
                raise TypeError(f"{algorithm}: there is an option {name} already")
    return found


DECLARED = _declared()
_Declared = dataclasses.make_dataclass(
    "_Declared", [(name, object, field) for name, field in DECLARED.items()], frozen=True
)


@dataclass(frozen=True, init=False)
class Config(_Declared):
    """Everything that defines a job; the defaults are the headline experiment.

    A switch that is None takes the value that `semantics` gives it (see `resolved`). The options
    that algorithms declare follow those that are here.
    """

    dataset: str = option(
        "Mnist", _Dataset(), "data set, a FILE.npz of arrays x, y, or a FOLDER of LEAF JSON"
    )
    model: str = option("mclr", _Model(), "model; or FILE.py:Class, your own")
    norm: str | None = option(
        None, Choice(NORMS), "what follows convolutions (default: by architecture)"
    )
    pretrained: bool = option(False, Flag(), "start ResNets from torchvision's ImageNet weights")
    bn: str = option(
        "aggregate",
        Choice(("aggregate", "local")),
        "BatchNorm parameters and statistics: averaged, or every user's own (FedBN)",
    )
    algorithm: str = option("pFedMe", Choice(ALGORITHMS), "algorithm")
    batch_size: int = option(20, COUNT, "samples per minibatch")
    learning_rate: float = option(
        0.005, STEP, "local step eta (pFedMe: of the outer steps; PerAvg: alpha)"
    )
    num_global_iters: int = option(800, Number(int, 0, 10**9), "communication rounds")
    local_epochs: int = option(
        20, Number(int, 1, 10**7), "local work R per round: minibatch steps or passes"
    )
    local_unit: str = option(
        "steps",
        Choice(("steps", "epochs")),
        "what --local_epochs counts: minibatch steps or passes",
    )
    local_epochs_range: tuple[int, int] | None = option(
        None, Range(), "draw each user's --local_epochs of a round from LO to HI, both included"
    )
    stragglers: float = option(
        0.0, Number(float, 0, 1), "share of the sampled users that do 1 to all of their local work"
    )
    user_dropout: float = option(
        0.0, Number(float, 0, 1), "probability that a sampled user does not report"
    )
    numusers: int = option(5, COUNT, "users sampled per round")
    times: int = option(1, Number(int, 1, 10**6), "repetitions")
    repetition: int | None = option(
        None, Number(int, 0, 10**6), "run this one of the --times repetitions, counted from 0"
    )
    seed: int = option(0, Number(int, 0, 2**32 - 1), "seed of initial model, sampling, batches")
    optimizer: str = option(
        "SGD", Choice(("SGD",)), "kept for old commands; every algorithm brings its own solver"
    )
    split: str = option("default", Text(), "default, published, a split file, or a LEAF folder")
    partition: str | None = option(
        None,
        _Partition(),
        "SCHEME[:key=value,...]: draw the split so, or reuse its file "
        "(python -m utils.partition --help)",
    )
    test_set: str = option(
        "user",
        Choice(("user", "global")),
        "test data of the global model: the users' test parts, or the data set's official ones",
    )
    data_dir: str | None = option(
        None, WholePath(), "folder of the data set's own files (default: in data/)"
    )
    split_dir: str | None = option(
        None,
        WholePath(),
        "folder where splits that are drawn are kept (default: in data/, or with the results)",
    )
    shared_split: str = option(
        "yes", Choice(("yes", "no")), "all repetitions on one split; no: each draws its own"
    )
    normalize: str | None = option(
        None, Choice(NORMALIZE), "features (default: by data set; images: pixel or channel)"
    )
    semantics: str = option(
        "paper", Choice(SEMANTICS), "defaults of the switches: the papers' or the authors' code's"
    )
    weighting: str | None = option(
        None, Choice(("uniform", "samples")), "weights of the average over sampled users"
    )
    batches: str | None = option(
        None, Choice(("shuffled", "cyclic")), "minibatches: fresh permutations, or file order"
    )
    shared_init: str | None = option(
        None, Choice(("yes", "no")), "all repetitions start from one model"
    )
    beta: float = option(1.0, STEP, "pFedMe: server step; PerAvg: step of the meta-update")
    lamda: float = option(15.0, STEP, "strength of the proximal term")
    K: int = option(5, COUNT, "inner steps for theta per local step")
    personal_learning_rate: float = option(0.1, STEP, "step of the inner steps for theta")
    inner_weight_decay: float | None = option(None, STEP, "weight decay of the inner steps")
    theta_start: str | None = option(
        None, Choice(("cold", "warm")), "theta starts each local round at w_i, or where it was"
    )
    personal: str | None = option(
        None, Choice(("theta", "local")), "which model is the personalised one"
    )
    participation: str = option(
        "all", Choice(("all", "sampled")), "who trains: all users (paper) or the sampled ones"
    )
    hessian: str = option(
        "fo", Choice(("fo", "hf", "exact")), "second-order term: dropped, by differences, exact"
    )
    hf_delta: float = option(1e-3, Number(float, 0, above=True), "step of --hessian hf")
    peravg_update: str | None = option(
        None, Choice(("restore", "two_step")), "beta-step from the original w, or a second step"
    )
    adapt: str | None = option(
        None, Choice(("train", "test_test", "test_train")), "data of the adaptation at evaluation"
    )
    mu: float = option(0.0, STEP, "strength of the proximal term mu/2 |y - x|^2")
    momentum: float = option(
        0.0, Number(float, 0, 0.999999), "local momentum, buffer zeroed every round"
    )
    server_momentum: float = option(0.0, Number(float, 0, 0.999999), "momentum of the server")
    server_learning_rate: float = option(1.0, STEP, "scale of the server's step")
    finetune_steps: int = option(
        0, Number(int, 0, 10**6), "evaluate the global model after so many steps of each user, too"
    )
    scaffold_option: int = option(2, Choice((1, 2)), "how c_i is updated: option I or II")
    eval_every: int = option(1, Number(int, 0, 10**9), "rounds between evaluations; 0: never")
    gpu: int = option(0, Device(), "CUDA device; -1: CPU")
    block_size: int | str = option(
        "auto", Auto(), "users trained in lockstep; 0: one at a time (reference engine)"
    )
    threads: int = option(1, Number(int, 1, 1024), "CPU threads")
    jobs: int = option(1, Number(int, 1, 1024), "processes that share the repetitions")
    lockstep: str = option(
        "auto", Choice(("auto", "yes", "no")), "all repetitions in one block; auto: on a GPU"
    )
    state_device: str = option(
        "model", Choice(("model", "cpu")), "where users' persistent state lies"
    )
    tf32: bool = option(False, Flag(), "allow TF32 products on a GPU")
    dtype: str = option("float32", Choice(("float32", "float64")), "number type")
    results_dir: str = option("results", Text(), "folder of the result files")
    log_file: str | None = option(None, Text(), "append one plain line per round to this file")
    save_every: float = option(30.0, STEP, "seconds between saves of an unfinished run")
    resume: bool = option(
        False, Flag(), "go on from checkpoints; repetitions that are finished are kept"
    )
    save_models: bool = option(
        False, Flag(), "store the personalised models in the `_p` result file"
    )

    def __init__(self, **given: object) -> None:
        """Options by name; others have the algorithm's own default, or else the common one.

        Raises InputError where the command line would.
        """
        algorithm = given.get("algorithm", Config.algorithm)
        algorithm = checked(FIELDS["algorithm"], algorithm, "Config: algorithm")
        given = ALGORITHMS[algorithm].defaults | given
        if unknown := [name for name in given if name not in FIELDS]:
            hint = meant(unknown[0], FIELDS)
            raise InputError(f"Config: {unknown[0]}: unknown option{hint and f'; {hint}'}")
        given = {name: checked(FIELDS[name], v, f"Config: {name}") for name, v in given.items()}
        for name, field in FIELDS.items():
            object.__setattr__(self, name, given.get(name, field.default))
        self._check()

    def _check(self) -> None:
        """InputError where options contradict each other."""
        if self.repetition is not None and self.repetition >= self.times:
            raise InputError(
                f"--repetition {self.repetition}: --times {self.times} has repetitions "
                f"0 to {self.times - 1}; raise --times"
            )
        if self.bn == "local" and "bn" not in self.server_class.reads():
            able = ", ".join(a for a, cls in ALGORITHMS.items() if "bn" in cls.reads())
            raise InputError(f"--bn local: not for {self.algorithm}, only for {able}")
        if self.partition is not None and self.split != "default":
            raise InputError(
                f"--partition {self.partition}: it draws a split, so give no --split {self.split}"
            )
        leaf = is_folder(self.dataset) and self.partition is None
        if self.shared_split == "no" and (leaf or self.split != "default"):
            what = "a LEAF folder" if leaf else f"--split {self.split}"
            raise InputError(f"--shared_split no: {what} is given, not drawn for a repetition")
        if self.test_set == "user" and self.drawn and not self.drawn.test:
            raise InputError(
                f"--partition {self.partition}: test=0 leaves nothing to evaluate on, unless with "
                "--test_set global"
            )
        self.server_class.check(self)

    @property
    def server_class(self):
        """The algorithm's Server subclass."""
        return ALGORITHMS[self.algorithm]

    @property
    def dataset_name(self) -> str:
        """How results call the data: a file's name stands for its path."""
        return dataset_name(self.dataset)

    @property
    def drawn(self) -> Partition | None:
        """`partition` with all its arguments; the official test rows stay out if they judge."""
        if self.partition is None:
            official = self.test_set == "global" and self.split == "default"
            return default_partition(self.dataset, "train") if official else None
        return parse(self.partition, "train" if self.test_set == "global" else "all")

    @property
    def repetitions(self) -> Sequence[int]:
        """Which repetitions this job runs."""
        return range(self.times) if self.repetition is None else [self.repetition]

    @property
    def primary(self) -> str:
        """Which personalised model the `_p` file holds; "" where the algorithm has none."""
        names = self.server_class.personal_names(self)
        return self.personal if self.personal in names else (*names, "")[0]

    def initial_seed(self, repetition: int) -> int:
        """The seed of a repetition's initial model."""
        return self.seed if self.shared_init == "yes" else self.seed + repetition

    def resolved(self) -> Config:
        """The same job with every switch spelled out."""
        values = SEMANTICS[self.semantics] | self.server_class.overrides.get(self.semantics, {})
        return dataclasses.replace(
            self, **{k: v for k, v in values.items() if getattr(self, k) is None}
        )

    def common(self) -> Config:
        """The same algorithm with every option at the default that all algorithms have."""
        own = {name: FIELDS[name].default for name in self.server_class.defaults}
        return Config(**own | {"algorithm": self.algorithm}).resolved()

    def options(self) -> list[str]:
        """The fields that this algorithm reads."""
        own, unread = self.server_class.reads(), self.server_class.unread
        return [f for f in FIELDS if f in own or (f not in ALGORITHM_FIELDS and f not in unread)]


# Inherited fields come first in a dataclass, and last here.
FIELDS: dict[str, dataclasses.Field] = {
    f.name: f for f in sorted(dataclasses.fields(Config), key=lambda f: f.name in DECLARED)
}
if taken := [name for name, field in DECLARED.items() if FIELDS[name] is not field]:
    raise TypeError(f"there is an option {taken[0]} already")
# Fields that only some algorithms read; everything else is common.
ALGORITHM_FIELDS = frozenset().union(*(cls.reads() for cls in ALGORITHMS.values()))
# Fields that change no number: where and how fast a job runs, which part of it, what is kept.
NOT_NUMBERS = frozenset(
    "times repetition optimizer semantics split partition data_dir split_dir gpu block_size "
    "threads jobs lockstep state_device results_dir save_every save_models resume log_file".split()
)


# Options that name a file and belong to no configuration: {name: (metavar, help)}.
FILES = {
    "config": (
        "FILE.yaml",
        "one run (keys = option names, or the collection's system: and client: keys) or many "
        "(defaults, runs; lists are swept); options on the command line win; of many runs, what is "
        "missing is run",
    ),
    "verify": (
        "FILE.h5",
        "run a recorded configuration anew, as it was started, and compare every array bitwise",
    ),
    "replay": (
        "FILE.h5",
        "run a recorded configuration again and compare (with --num_global_iters, --results_dir, "
        "--gpu, --block_size, --threads, --eval_every, --data_dir)",
    ),
}


# What other projects call some options.
COMMON = {
    **{"lr": "learning_rate", "alpha": "learning_rate", "lambda": "lamda", "clients": "numusers"},
    **{"rounds": "num_global_iters", "num_rounds": "num_global_iters", "epochs": "local_epochs"},
    **{"weight_decay": "inner_weight_decay"},
}


def meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The known option that an unknown name stands for, as a question; empty if there is none.

    Of an algorithm's own option that others call otherwise it says what it is, and whose.
    """
    other = COMMON.get(name)
    if other not in known:
        near = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {prefix}{near[0]}?" if near else ""
    readers = [a for a, cls in ALGORITHMS.items() if other in cls.reads()]
    about = f" ({FIELDS[other].metadata['help']}; {', '.join(readers)})" if readers else ""
    return f"did you mean {prefix}{other}{about}?"


def parse_value(name: str, text: str, where: str) -> object:
    """One option's text as its value; `where` says how the user spelled the option.

    Raises InputError naming the value and what is valid.
    """
    return parse_text(FIELDS[name], text, where)


def read_yaml(path: str) -> yaml.MappingNode:
    """A YAML file's top level, its scalars still text; raises InputError."""
    try:
        # Scalars stay text, so that the options' own parsers are the only judges of values.
        node = yaml.compose(Path(path).read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"--config {path}: {reason}") from None
    # The library's own ValueError and OverflowError: escapes outside of Unicode.
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise InputError(f"--config {path}: not valid YAML{line}") from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"--config {path}: must hold lines `option: value`")
    return node


QUOTES = 'a partition between braces or brackets needs quotes: "SCHEME:key=value,..."'


def yaml_items(
    node: yaml.Node, known: Iterable[str], where: str, section: str = ""
) -> dict[str, yaml.Node]:
    """A mapping's values by key; raises InputError for keys that are unknown or given twice.

    Of a `section` the message says which one it is, and what it may hold.
    """
    if not isinstance(node, yaml.MappingNode):
        what = f"{section} " if section else ""
        raise InputError(f"{where}: {what}must hold lines `key: value`")
    inside = f" in {section}" if section else ""
    valid = f"there are {', '.join(known)}" if section else "see python main.py --help"
    found = {}
    for name, value in node.value:
        key = name.value if isinstance(name, yaml.ScalarNode) else "a list or mapping"
        if key not in known:
            # { } ends a plain text at its first comma.
            torn = QUOTES if node.flow_style and "=" in key else ""
            hint = torn or meant(key, known) or valid
            raise InputError(f"{where}: unknown key {key!r}{inside}; {hint}")
        if key in found:
            raise InputError(f"{where}: {key} is given twice")
        found[key] = value
    return found


def yaml_option(key: str, node: yaml.Node, where: str) -> object:
    """An option's value in a YAML file; raises InputError."""
    parts = node.value if is_pair(key, node) else [node]
    text = " ".join(yaml_text(key, part, where) for part in parts)
    return parse_value(key, text, f"{where}: {key}")


def yaml_text(key: str, node: yaml.Node, where: str) -> str:
    """A single value's text; raises InputError for anything else."""
    if not isinstance(node, yaml.ScalarNode) or node.value in ("", "null", "~"):
        torn = f"; {QUOTES}" if key == "partition" else ""
        raise InputError(f"{where}: {key} needs a single value{torn}")
    return node.value


def is_pair(key: str, node: yaml.Node) -> bool:
    """Whether a list is one value, of an option that takes two numbers."""
    if not isinstance(FIELDS[key].metadata["parse"], Range):
        return False
    listed = isinstance(node, yaml.SequenceNode)
    return listed and all(isinstance(part, yaml.ScalarNode) for part in node.value)


def build_parser() -> Parser:
    """The command line; options are grouped by which algorithms read them."""
    parser = Parser(
        prog="main.py",
        description="Personalised and baseline federated learning.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in FIELDS.items():
        readers = [a for a, cls in ALGORITHMS.items() if name in cls.reads()]
        title = "read by " + ", ".join(readers) if readers else "common options"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups[title]
        parse, text = field.metadata["parse"], field.metadata["help"]
        if isinstance(parse, Flag):
            group.add_argument(f"--{name}", action="store_const", const="true", help=text)
            continue
        if isinstance(parse, Range):
            group.add_argument(f"--{name}", nargs=2, metavar=("LO", "HI"), help=text)
            continue
        default = "by semantics" if name in SWITCHES else field.default
        own = {a: cls.defaults[name] for a, cls in ALGORITHMS.items() if name in cls.defaults}
        shown = [*([] if default is None else [default]), *(f"{a}: {v}" for a, v in own.items())]
        shown = f" (default: {'; '.join(map(str, shown))})" if shown else ""
        choices = "{" + ",".join(parse.names) + "}" if isinstance(parse, Choice) else None
        group.add_argument(f"--{name}", metavar=choices or name.upper(), help=text + shown)
    group = parser.add_argument_group("files")
    for name, (metavar, text) in FILES.items():
        group.add_argument(f"--{name}", metavar=metavar, help=text)
    return parser


def parse_command_line(argv: Sequence[str]) -> tuple[dict[str, object], dict[str, str]]:
    """The options given, as Config values, and the files named."""
    _check_names(argv)
    given = vars(build_parser().parse_args(argv))
    files = {name: given.pop(name, None) for name in FILES}
    for name, path in files.items():
        if path == "":
            raise InputError(f"--{name}: the file name is empty")
    values = {}
    for name, text in given.items():
        text = text if isinstance(text, str) else " ".join(text)
        values[name] = parse_value(name, text, f"--{name}")
    return values, {name: path for name, path in files.items() if path is not None}


def _check_names(argv: Sequence[str]) -> None:
    known = (*FIELDS, *FILES, "help")
    for word in argv:
        option = word.split("=")[0]
        name = option.removeprefix("--")
        if option.startswith("--") and name not in known:
            hint = meant(name, known[:-1], "--") or "see --help"
            raise InputError(f"{option}: unknown option; {hint}")


def notices(config: Config, given: Iterable[str]) -> list[str]:
    """What the user should know before the first round, a line each."""
    unread = [f"--{name}" for name in given if name not in config.options()]
    found = [f"{config.algorithm} does not read {', '.join(unread)}"] if unread else []
    if config.local_epochs_range and "local_epochs" in given:
        found.append("--local_epochs has no effect with --local_epochs_range")
    if config.stragglers and not round(config.stragglers * config.numusers):
        found.append(f"--stragglers {config.stragglers:g} of --numusers {config.numusers}: nobody")
    if config.user_dropout == 1 and "user_dropout" in config.options():
        found.append("--user_dropout 1: nobody ever reports; the global model stays as it is")
    return found + config.server_class.warnings(config.resolved())


def say(text: str) -> None:
    """A line for the user beside the results."""
    print(text, file=sys.stderr, flush=True)
