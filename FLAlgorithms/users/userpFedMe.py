"""pFedMe's user. Paper and differences: servers/serverpFedMe.py."""

from __future__ import annotations

from FLAlgorithms.optimizers.fedoptimizer import ProximalSGD
from FLAlgorithms.users.userbase import User
from utils.params import Params, assign_, clone, lerp_


class UserpFedMe(User):
    """R rounds of: theta ~ argmin f_i(theta) + lambda/2 |theta - w_i|^2; w_i moves towards it."""

    state = {"theta": "model"}
    personal = ("theta", "local")

    def train(self) -> None:
        config = self.config
        w = clone(self.params)  # w_{i,0} = w_t; the live parameters are theta until the end
        prox = ProximalSGD(
            self.params,
            config.personal_learning_rate,
            strength=config.lamda,
            decay=config.inner_weight_decay,
        )
        cold = config.theta_start == "cold"
        for batch in self.local_steps():
            for _ in self.proximal_loop(batch, prox, w, config.K, restart=cold):
                # theta <- theta - plr (g + lambda (theta - w_i) + d theta)
                self.backward(batch)
                prox.step(w, self.active)
            # w_i <- w_i - eta lambda (w_i - theta)
            lerp_(w, self.params, config.learning_rate * config.lamda * self.active)
        self.theta = clone(self.params)
        assign_(self.params, w)

    def personalized(self) -> dict[str, Params]:
        """theta_i, and the local model w_i that the published curves show."""
        return {"theta": self.theta, "local": self.params}
