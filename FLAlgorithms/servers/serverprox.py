"""FedProx.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in
Heterogeneous Networks. MLSys 2020.

Differences from the paper:
1. Users are sampled uniformly and averaged by their samples, as in FedAvg; `--weighting uniform`
   gives the plain average.
2. The local problem is solved by a fixed number of SGD steps, not to a measured inexactness.
Differences from the authors' code: 1. `--momentum`, off by default, is an addition.
"""

from __future__ import annotations

from FLAlgorithms.servers.serveravg import FedAvg
from FLAlgorithms.users.userprox import UserProx


class FedProx(FedAvg):
    """FedAvg's server; the users' objective has a proximal term."""

    user_class = UserProx
    options = (*FedAvg.options, "mu")
    drops_stragglers = False
    step_options = (*FedAvg.step_options, "mu")

    @classmethod
    def warnings(cls, config) -> list[str]:
        alike = not (config.mu or config.stragglers)
        return ["--mu 0: FedProx without its proximal term is FedAvg"] if alike else []
