"""Per-FedAvg.

A. Fallah, A. Mokhtari, A. Ozdaglar. Personalized Federated Learning with Theoretical Guarantees:
A Model-Agnostic Meta-Learning Approach. NeurIPS 2020.

Differences from the paper: 1. `--local_epochs R` steps of fresh minibatches D, D', D''.
Differences from the authors' code (the pFedMe project's Per-FedAvg), by default:
1. A personalised model is one alpha-step on train data; there the adaptation used test data
   (`--adapt test_test`).
2. Uniform weights and shuffled minibatches; there weights by samples and file order.
3. The published curves come from two plain SGD steps (`--semantics authors2020`).
"""

from __future__ import annotations

from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.users.userperavg import UserPerAvg
from utils.errors import InputError
from utils.params import WeightedMean, assign_


class PerAvg(Server):
    """Average the users' meta-updated models; a user adapts the result by one step."""

    user_class = UserPerAvg
    options = ("beta", "hessian", "hf_delta", "peravg_update", "adapt", "save_models")
    overrides = {"paper": {"weighting": "uniform"}}
    personal_at = "start"
    step_options = ("learning_rate", "beta")

    @classmethod
    def check(cls, config) -> None:
        if config.peravg_update == "two_step" and config.hessian != "fo":
            raise InputError(
                f"--hessian {config.hessian}: the two_step update has no second-order term; "
                "use --peravg_update restore"
            )

    @classmethod
    def warnings(cls, config) -> list[str]:
        idle = config.hessian != "hf" and config.hf_delta != type(config).hf_delta
        lines = {
            f"--hf_delta {config.hf_delta:g} has no effect without --hessian hf": idle,
            f"--beta {config.beta:g} is its step; published: 0.001 to 0.003": config.beta >= 1,
        }
        return [line for line, applies in lines.items() if applies]

    def round(self) -> None:
        mean = WeightedMean()
        for user in self.trained(self.sample()):
            mean.add(user.weight, user.params)
        assign_(self.params, mean.value(self.params))  # w <- mean_S w_i
