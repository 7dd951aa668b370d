"""FedAvg.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. Communication-Efficient Learning of
Deep Networks from Decentralized Data. AISTATS 2017.

Differences from the paper:
1. `--local_epochs R` counts minibatch steps unless `--local_unit epochs`.
2. `--momentum` (local), `--server_learning_rate` and `--finetune_steps` (evaluate the global model
   after so many local steps of every user, too) are additions, off by default.
3. Stragglers (`--stragglers`) are dropped, as the FedProx paper lets FedAvg do.
Differences from the authors' code (the pFedMe project's FedAvg): none known under
`--semantics authors`; by default its minibatches are shuffled, there they come in file order.
"""

from __future__ import annotations

from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.users.useravg import UserAVG
from utils.params import WeightedMean, lerp_


class FedAvg(Server):
    """Average the sampled users' models, weighted by their samples."""

    user_class = UserAVG
    options = ("momentum", "server_learning_rate", "finetune_steps", "save_models", "bn")
    personal_at = "start"
    drops_stragglers = True
    step_options = ("learning_rate", "server_learning_rate")

    @classmethod
    def warnings(cls, config) -> list[str]:
        idle = config.save_models and not config.finetune_steps
        return ["--save_models has no effect without --finetune_steps"] if idle else []

    @classmethod
    def personal_names(cls, config) -> tuple[str, ...]:
        return cls.user_class.personal if config.finetune_steps else ()

    def round(self) -> None:
        mean = WeightedMean()
        for user in self.trained(self.sample()):
            mean.add(user.weight, user.params)
        # x <- x + eta_s sum_S p_i (y_i - x), p_i = n_i / sum_S n_j
        lerp_(self.params, mean.value(self.params), self.config.server_learning_rate)
