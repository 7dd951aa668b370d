"""Local: every user trains alone, and nothing is ever averaged.

The line that every personalised method has to beat. It has no paper of its own, and the papers of
pFedMe and Per-FedAvg do not show it. The global model stays the initial one.

Differences from the papers that show such a line, and from the authors' code: none known.
"""

from __future__ import annotations

from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.users.userlocal import UserLocal


class Local(Server):
    """R steps a round for every user, from where its own last round ended."""

    user_class = UserLocal
    options = ("momentum", "save_models")
    unread = ("numusers", "weighting", "user_dropout")
    personal_at = "trained"

    def round(self) -> None:
        self.sample()  # for the record: nobody is aggregated
        for _ in self.trained(self.everyone):
            pass
