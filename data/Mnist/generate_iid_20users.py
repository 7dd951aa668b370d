"""MNIST dealt evenly to 20 users: everyone has every label."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.generate import main

if __name__ == "__main__":
    sys.exit(main("Mnist", "iid"))
