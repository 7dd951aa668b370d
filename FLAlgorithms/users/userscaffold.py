"""SCAFFOLD's user. Paper and differences: servers/serverscaffold.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import CorrectedSGD
from FLAlgorithms.users.userbase import User
from utils.params import Params, add_, clone, combine


class UserSCAFFOLD(User):
    """Local SGD with the drift removed: g - c_i + c."""

    state = {"c_i": "zeros"}
    acknowledged = ("c_i",)  # else c would no longer be their mean
    uploads = ("params", "delta_c")

    def train(self, c: Params) -> None:
        eta, option = self.config.learning_rate, self.config.scaffold_option
        x = clone(self.params)
        if option == 1:
            self.delta_c = combine(self.full_gradient(), self.c_i)  # c_i+ = grad f_i(x)
        correction = combine(c, self.c_i)
        sgd = CorrectedSGD(self.params, eta)
        for batch in self.local_steps():
            self.backward(batch)
            sgd.step(correction, self.active)  # y <- y - eta (g - c_i + c)
        if option == 2:
            # c_i+ - c_i = (x - y_i) / (K eta) - c, K = steps really taken
            drift = combine(x, self.params, 1 / (eta * self.num_steps))
            self.delta_c = combine(drift, c)
        add_(self.c_i, self.delta_c, 1.0)
