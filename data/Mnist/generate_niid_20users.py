"""MNIST for 20 users with 2 labels each, every image of those labels used exactly once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.generate import main

if __name__ == "__main__":
    sys.exit(main("Mnist", "niid"))
