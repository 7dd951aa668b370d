"""FedNova's user. Paper and differences: servers/servernova.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import ProximalSGD
from FLAlgorithms.users.userbase import User
from utils.params import clone, combine


class UserNova(User):
    """Local SGD with momentum and proximal term that counts |a_i|, its normaliser, as it goes."""

    uploads = ("d", "tau")

    def train(self) -> None:
        config = self.config
        eta, rho, alpha = config.learning_rate, config.momentum, config.learning_rate * config.mu
        x = clone(self.params)
        sgd = ProximalSGD(self.params, eta, config.mu, rho)
        s, a = 0.0, self.numbers(0.0)
        for batch in self.local_steps():
            self.backward(batch)
            sgd.step(x, self.active)
            s = rho * s + 1.0
            a = a + self.active * (s - alpha * a)  # |a| <- (1 - alpha) |a| + s
        self.d = combine(x, self.params, 1 / (eta * a))  # d_i = (x - y_i) / (eta |a_i|)
        self.tau = self.num_steps if config.mu else a
