"""Local's user: goes on from its own model. See servers/serverlocal.py."""

from __future__ import annotations

from FLAlgorithms.users.useravg import UserAVG
from utils.params import Params, assign_, clone


class UserLocal(UserAVG):
    """Plain local SGD on a model of its own; nothing is received or sent."""

    state = {"alone": "model"}
    uploads = ()
    personal = ("alone",)

    def train(self) -> None:
        assign_(self.params, self.alone)
        super().train()
        self.alone = clone(self.params)

    def personalized(self) -> dict[str, Params]:
        """The user's own model."""
        return {"alone": self.alone}
