"""Ditto's user. Paper: servers/serverditto.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import ProximalSGD
from FLAlgorithms.users.useravg import UserAVG
from utils.params import Params, assign_, clone


class UserDitto(UserAVG):
    """FedAvg's steps on the global model, and as many on the user's own v, pulled towards it."""

    state = {"v": "model"}
    personal = ("v",)

    def train(self) -> None:
        config, w = self.config, clone(self.params)
        super().train()
        trained = clone(self.params)
        assign_(self.params, self.v)
        sgd = ProximalSGD(self.params, config.learning_rate, config.ditto_lamda)
        for batch in self.local_steps():  # fresh minibatches
            self.backward(batch)
            sgd.step(w, self.active)  # v <- v - eta (g + lambda (v - w))
        self.v = clone(self.params)
        assign_(self.params, trained)

    def personalized(self) -> dict[str, Params]:
        """The user's own model."""
        return {"v": self.v}
