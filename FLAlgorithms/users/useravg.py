"""FedAvg's user: R local SGD steps, and fine-tuning. Paper, differences: servers/serveravg.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import LocalSGD
from FLAlgorithms.users.userbase import User
from utils.params import Params


class UserAVG(User):
    """Plain local SGD, momentum buffer zeroed every round."""

    personal = ("finetuned",)

    def train(self) -> None:
        sgd = LocalSGD(self.params, self.config.learning_rate, self.config.momentum)
        for batch in self.local_steps():
            self.backward(batch)
            sgd.step(self.active)  # y <- y - eta g

    def personalized(self) -> dict[str, Params]:
        """`--finetune_steps` plain SGD steps from the received model on the user's train data."""
        sgd = LocalSGD(self.params, self.config.learning_rate)
        for batch in self.finetuning_steps(self.config.finetune_steps):
            self.backward(batch)
            sgd.step(self.active)
        return {"finetuned": self.params}
