"""FedNova.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization. NeurIPS 2020.

Differences from the paper: 1. The weights p_i are renormalised over the sampled users.
Differences from the authors' code: none known.
"""

from __future__ import annotations

from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.users.usernova import UserNova
from utils.errors import InputError
from utils.params import WeightedMean, add_, scale_


class FedNova(Server):
    """Average normalised updates, then step as far as the users went on average."""

    user_class = UserNova
    options = ("momentum", "mu", "server_momentum", "server_learning_rate", "bn")
    state = ("u",)
    step_options = ("learning_rate", "mu", "server_learning_rate")

    @classmethod
    def check(cls, config) -> None:
        if not config.learning_rate:
            raise InputError("--learning_rate 0: FedNova divides by it; give a number > 0")

    def setup(self) -> None:
        self.u = self.zeros()

    def round(self) -> None:
        config = self.config
        d, tau = WeightedMean(), WeightedMean()
        for user in self.trained(self.sample()):
            d.add(user.weight, user.d)
            tau.add(user.weight, [user.tau])
        (tau_eff,) = tau.value([self.params[0].new_zeros(())])  # sum_S p_i |a_i|
        scale_(self.u, config.server_momentum)
        add_(self.u, d.value(self.zeros()), tau_eff)  # u <- gamma u + tau_eff sum_S p_i d_i
        # x <- x - eta_s eta u
        add_(self.params, self.u, -config.server_learning_rate * config.learning_rate)
