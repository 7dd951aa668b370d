"""FedAvg's user: R local SGD steps. Paper and differences: servers/serveravg.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import LocalSGD
from FLAlgorithms.users.userbase import User


class UserAVG(User):
    """Plain local SGD, momentum buffer zeroed every round."""

    def train(self) -> None:
        sgd = LocalSGD(self.params, self.config.learning_rate, self.config.momentum)
        for batch in self.local_steps():
            self.backward(batch)
            sgd.step(self.active)  # y <- y - eta g
