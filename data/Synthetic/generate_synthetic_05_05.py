"""Synthetic(0.5, 0.5): 100 users, each with a model and inputs of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.generate import main

if __name__ == "__main__":
    sys.exit(main("Synthetic", "synthetic"))
