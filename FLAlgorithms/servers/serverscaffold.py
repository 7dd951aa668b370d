"""SCAFFOLD.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning. ICML 2020.

Differences from the paper: 1. Option I takes the gradient at x over all of a user's train data.
Differences from the authors' code: none known (their code was not compared).
"""

from __future__ import annotations

from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.users.userscaffold import UserSCAFFOLD
from utils.errors import InputError
from utils.params import WeightedMean, add_, lerp_


class SCAFFOLD(Server):
    """Server control c = mean of all users' controls c_i after every round; all start at zero."""

    user_class = UserSCAFFOLD
    options = ("scaffold_option", "server_learning_rate")
    state = ("c",)
    step_options = ("learning_rate", "server_learning_rate")
    overrides = {name: {"weighting": "uniform"} for name in ("paper", "authors", "authors2020")}

    @classmethod
    def check(cls, config) -> None:
        if config.momentum:
            raise InputError(
                f"--momentum {config.momentum:g}: SCAFFOLD's local solver is plain SGD; leave it 0"
            )
        if not config.learning_rate:
            raise InputError("--learning_rate 0: SCAFFOLD divides by it; give a number > 0")

    def setup(self) -> None:
        self.c = self.zeros()

    def round(self) -> None:
        x, delta_c = WeightedMean(), WeightedMean()
        for user in self.trained(self.sample(), c=self.c):
            x.add(user.weight, user.params)
            delta_c.add(user.weight, user.delta_c)
        # x <- x + eta_g mean_S (y_i - x)
        lerp_(self.params, x.value(self.params), self.config.server_learning_rate)
        # c <- c + (1/N) sum_S (c_i+ - c_i), N = all users
        add_(self.c, delta_c.sum(self.c), 1 / self.total_weight)
