"""pFedMe.

C. T. Dinh, N. H. Tran, T. D. Nguyen. Personalized Federated Learning with Moreau Envelopes.
NeurIPS 2020.

Differences from the paper: 1. `--participation sampled` (off by default) trains only the sampled
users. 2. The proximal problem is solved by K plain gradient steps on one minibatch.
Differences from the authors' code, by default (all gone with `--semantics authors`):
1. The personalised model is theta_i; their curves show the local model w_i (`--personal local`).
2. theta starts each local round at w_i; there at the last theta (`--theta_start warm`).
3. No weight decay in the inner steps; there 0.001 (`--inner_weight_decay`).
4. Uniform weights and shuffled minibatches; there weights by samples and file order.
5. Repetitions differ in the initial model; there they share it (`--shared_init yes`).
"""

from __future__ import annotations

from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.users.userpFedMe import UserpFedMe
from utils.params import WeightedMean, lerp_


class pFedMe(Server):
    """All users solve their Moreau envelopes; the sampled users' w_i move the server by beta."""

    user_class = UserpFedMe
    options = (
        *("beta", "lamda", "K", "personal_learning_rate", "inner_weight_decay"),
        *("theta_start", "personal", "participation", "save_models"),
    )
    overrides = {"paper": {"weighting": "uniform"}}
    personal_at = "trained"
    step_options = ("personal_learning_rate", "learning_rate", "lamda", "beta")

    @classmethod
    def warnings(cls, config) -> list[str]:
        eta, plr, lamda = config.learning_rate, config.personal_learning_rate, config.lamda
        decay = config.inner_weight_decay
        found = []
        if eta * lamda > 1:
            found.append(
                f"--learning_rate {eta:g} times --lamda {lamda:g} is {eta * lamda:g} > 1: "
                "the outer step overshoots theta"
            )
        if plr * (lamda + decay) > 2:
            found.append(
                f"--personal_learning_rate {plr:g} times (--lamda {lamda:g} + decay {decay:g}) is "
                f"{plr * (lamda + decay):g} > 2: the inner steps diverge whatever the data"
            )
        return found

    def round(self) -> None:
        sampled = self.sample()
        trained = {"all": self.everyone, "sampled": sampled}[self.config.participation]
        mean = WeightedMean()
        for user in self.trained(trained):
            mean.add(user.weight, user.params)  # weight 0 outside the sample
        lerp_(
            self.params, mean.value(self.params), self.config.beta
        )  # (1 - beta) w + beta mean_S w_i
