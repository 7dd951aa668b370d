"""Ditto.

T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through
Personalization. ICML 2021.

Differences from the paper: v takes as many steps as the model that is sent.
Differences from the authors' code: not known.
"""

from __future__ import annotations

from FLAlgorithms.users.userditto import UserDitto

from FLAlgorithms.servers.serverbase import Server
from utils.options import STEP, option
from utils.params import WeightedMean, assign_


class Ditto(Server):
    """FedAvg, beside which every user keeps a model of its own near the global one."""

    user_class = UserDitto
    options = ("momentum", "save_models")
    new_options = {"ditto_lamda": option(0.1, STEP, "pull of a user's own model towards w")}
    defaults = {"learning_rate": 0.01}
    personal_at = "trained"
    step_options = ("ditto_lamda", "learning_rate")

    def round(self) -> None:
        mean = WeightedMean()
        for user in self.trained(self.sample()):
            mean.add(user.weight, user.params)
        assign_(self.params, mean.value(self.params))
