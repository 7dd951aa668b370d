"""The same jobs as a researcher would first write them: the yardstick of run.py.

One nn.Module per user, DataLoaders over (x, y) tuples, loss.backward(), optimizer.step(), and every
user's train and test data evaluated through DataLoaders every round. Minibatches come in file
order, so that with `--batches cyclic` and the same weights the suite computes the same numbers
(tests/test_benchmarks.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader

from utils.config import Config


class TextbookUser:
    """One user: its model, its data, its optimizer."""

    def __init__(self, train: list, test: list, model: nn.Module, config: Config) -> None:
        self.model, self.config, self.num_samples = copy.deepcopy(model), config, len(train)
        self.train_loader = DataLoader(train, config.batch_size)
        self.full_train, self.full_test = DataLoader(train, len(train)), DataLoader(test, len(test))
        self.batches = iter(self.train_loader)
        self.loss = nn.CrossEntropyLoss()

    def next_batch(self) -> list[torch.Tensor]:
        """The next minibatch, from the start again when the data are used up."""
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.train_loader)
            return next(self.batches)

    def steps(self) -> int:
        """Local steps of a round."""
        if self.config.local_unit == "epochs":
            return self.config.local_epochs * len(self.train_loader)
        return self.config.local_epochs

    def receive(self, model: nn.Module) -> None:
        """Copy the server's parameters."""
        self.model.load_state_dict(model.state_dict())

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Gradient of the minibatch loss."""
        self.model.zero_grad()
        self.loss(self.model(x), y).backward()

    def train(self) -> None:
        """R steps of SGD."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config.learning_rate)
        for _ in range(self.steps()):
            self.backward(*self.next_batch())
            optimizer.step()

    def evaluate(self) -> tuple[int, float, int]:
        """Right test samples, mean train loss, right train samples of the current model."""
        self.model.eval()
        right, loss = [], 0.0
        with torch.no_grad():
            for loader in (self.full_test, self.full_train):
                for x, y in loader:
                    out = self.model(x)
                    right.append((out.argmax(1) == y).sum().item())
                    loss = self.loss(out, y).item()
        self.model.train()
        return right[0], loss, right[1]


class ProxSGD(torch.optim.Optimizer):
    """pFedMe's inner step: theta <- theta - plr (g + lambda (theta - w))."""

    def __init__(self, params, lr: float, lamda: float) -> None:
        super().__init__(params, {"lr": lr, "lamda": lamda})

    def step(self, anchor) -> None:
        for group in self.param_groups:
            for p, w in zip(group["params"], anchor, strict=True):
                p.data = p.data - group["lr"] * (p.grad.data + group["lamda"] * (p.data - w.data))


class PFedMeUser(TextbookUser):
    """Cold-started theta, K inner steps per minibatch."""

    def train(self) -> None:
        c = self.config
        local = [p.detach().clone() for p in self.model.parameters()]
        optimizer = ProxSGD(self.model.parameters(), c.personal_learning_rate, c.lamda)
        for _ in range(self.steps()):
            x, y = self.next_batch()
            for p, w in zip(self.model.parameters(), local, strict=True):
                p.data = w.data.clone()
            for _ in range(c.K):
                self.backward(x, y)
                optimizer.step(local)
            for p, w in zip(self.model.parameters(), local, strict=True):
                w.data = w.data - c.learning_rate * c.lamda * (w.data - p.data)
        self.theta = [p.detach().clone() for p in self.model.parameters()]
        for p, w in zip(self.model.parameters(), local, strict=True):
            p.data = w.data

    def personal(self) -> None:
        """Make theta the current model."""
        for p, t in zip(self.model.parameters(), self.theta, strict=True):
            p.data = t.data.clone()


class PerAvgUser(TextbookUser):
    """First-order MAML steps."""

    def train(self) -> None:
        inner = torch.optim.SGD(self.model.parameters(), lr=self.config.learning_rate)
        outer = torch.optim.SGD(self.model.parameters(), lr=self.config.beta)
        for _ in range(self.steps()):
            start = copy.deepcopy(self.model.state_dict())
            self.backward(*self.next_batch())
            inner.step()
            self.backward(*self.next_batch())
            self.model.load_state_dict(start)
            outer.step()

    def personal(self) -> None:
        """One step on a fresh train minibatch."""
        self.backward(*next(iter(self.train_loader)))
        torch.optim.SGD(self.model.parameters(), lr=self.config.learning_rate).step()


class ScaffoldUser(TextbookUser):
    """Corrected steps, option II."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.control = [torch.zeros_like(p) for p in self.model.parameters()]

    def train(self) -> None:
        eta, steps = self.config.learning_rate, self.steps()
        start = [p.detach().clone() for p in self.model.parameters()]
        for _ in range(steps):
            self.backward(*self.next_batch())
            params = zip(self.model.parameters(), self.control, self.server_control, strict=True)
            for p, c_i, c in params:
                p.data = p.data - eta * (p.grad.data - c_i + c)
        self.delta = []
        for i, (p, x) in enumerate(zip(self.model.parameters(), start, strict=True)):
            new = self.control[i] - self.server_control[i] + (x - p.data) / (steps * eta)
            self.delta.append(new - self.control[i])
            self.control[i] = new


class Textbook:
    """The server and its users; `seconds` adds up local training, evaluation and the rest."""

    user_class = TextbookUser
    weighting = "samples"

    def __init__(self, config: Config, model: nn.Module, parts: list[tuple[list, list]]) -> None:
        """`parts[i]`: user i's train and test samples, lists of (x, y)."""
        self.config, self.model = config, copy.deepcopy(model)
        self.users = [self.user_class(train, test, model, config) for train, test in parts]
        self.seconds = {"training": 0.0, "evaluation": 0.0, "round": 0.0}

    def run_round(self, selected: list[int]) -> None:
        """Evaluate, train, aggregate."""
        with self.timed("round"):
            self.selected = selected
            with self.timed("evaluation"):
                for user in self.users:
                    user.receive(self.model)
                self.evaluate()
            self.round()

    def round(self) -> None:
        self.train(self.selected)
        self.average(self.selected)

    def train(self, users) -> None:
        """Local training of some users, one after the other."""
        with self.timed("training"):
            for i in users:
                self.users[i].receive(self.model)
                self.users[i].train()

    def average(self, users) -> None:
        """Weighted mean of the users' parameters."""
        weight = {"samples": lambda u: u.num_samples, "uniform": lambda u: 1}[self.weighting]
        total = sum(weight(self.users[i]) for i in users)
        mean = [torch.zeros_like(p) for p in self.model.parameters()]
        for i in users:
            for m, p in zip(mean, self.users[i].model.parameters(), strict=True):
                m.add_(p.data * weight(self.users[i]) / total)
        for p, m in zip(self.model.parameters(), mean, strict=True):
            p.data = m

    def evaluate(self) -> None:
        """All users with their current models; keeps accuracy and loss."""
        found = [user.evaluate() for user in self.users]
        self.last = sum(r for r, *_ in found)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds of a block to `seconds[what]`."""
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start


class PFedMe(Textbook):
    user_class = PFedMeUser

    def round(self) -> None:
        self.train(range(len(self.users)))
        with self.timed("evaluation"):
            local = [copy.deepcopy(user.model.state_dict()) for user in self.users]
            for user in self.users:
                user.personal()
            self.evaluate()
            for user, state in zip(self.users, local, strict=True):
                user.model.load_state_dict(state)
        self.average(self.selected)


class PerAvg(Textbook):
    user_class = PerAvgUser

    def round(self) -> None:
        with self.timed("evaluation"):
            for user in self.users:
                user.personal()
            self.evaluate()
        super().round()


class Scaffold(Textbook):
    user_class = ScaffoldUser
    weighting = "uniform"

    def round(self) -> None:
        if not hasattr(self, "control"):
            self.control = [torch.zeros_like(p) for p in self.model.parameters()]
        for i in self.selected:
            self.users[i].server_control = self.control
        self.train(self.selected)
        self.average(self.selected)
        for k in range(len(self.control)):
            change = sum(self.users[i].delta[k] for i in self.selected)
            self.control[k] = self.control[k] + change / len(self.users)


class FedNova(Textbook):
    def round(self) -> None:
        self.train(self.selected)
        users = [self.users[i] for i in self.selected]
        total = sum(u.num_samples for u in users)
        tau_eff = sum(u.num_samples / total * u.steps() for u in users)
        for k, p in enumerate(self.model.parameters()):
            moves = [
                u.num_samples / total * (list(u.model.parameters())[k].data - p.data) / u.steps()
                for u in users
            ]
            p.data = p.data + tau_eff * sum(moves)


TEXTBOOK: dict[str, type[Textbook]] = {
    "FedAvg": Textbook,
    "pFedMe": PFedMe,
    "PerAvg": PerAvg,
    "SCAFFOLD": Scaffold,
    "FedNova": FedNova,
}
