"""The registry: a new algorithm is a server file, a user file and a line here."""

from FLAlgorithms.servers.serveravg import FedAvg
from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.servers.serverlocal import Local
from FLAlgorithms.servers.servernova import FedNova
from FLAlgorithms.servers.serverperavg import PerAvg
from FLAlgorithms.servers.serverpFedMe import pFedMe
from FLAlgorithms.servers.serverprox import FedProx
from FLAlgorithms.servers.serverscaffold import SCAFFOLD

ALGORITHMS: dict[str, type[Server]] = {
    "pFedMe": pFedMe,
    "PerAvg": PerAvg,
    "FedAvg": FedAvg,
    "FedProx": FedProx,
    "FedNova": FedNova,
    "SCAFFOLD": SCAFFOLD,
    "Local": Local,
}
