"""The one exception that a user is meant to see."""


class InputError(Exception):
    """Bad input, told in one line: what, its value, and the valid choices or range.

    `main.py`, `main_plot.py` and the scripts under `data/` print the message on stderr and exit
    with code 2.
    """
