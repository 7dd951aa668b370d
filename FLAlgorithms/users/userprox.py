"""FedProx's user. Paper and differences: servers/serverprox.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import ProximalSGD
from FLAlgorithms.users.userbase import User
from utils.params import clone


class UserProx(User):
    """Local SGD on f_i(y) + mu/2 |y - x|^2, x the model received this round."""

    def train(self) -> None:
        config = self.config
        x = clone(self.params)
        sgd = ProximalSGD(self.params, config.learning_rate, config.mu, config.momentum)
        for batch in self.local_steps():
            self.backward(batch)
            sgd.step(x, self.active)  # y <- y - eta (g + mu (y - x))
