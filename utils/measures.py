"""Figures of a run that the tables of main.py and main_plot.py share; needs no torch."""

import numpy as np


def late_count(rounds: np.ndarray) -> int:
    """How many evaluations the late mean takes: a tenth of them, 1 to 10, but never round 0."""
    return min(10, max(1, len(rounds) // 10), np.count_nonzero(rounds))


def late_mean(accuracy: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Mean over the last evaluations of a run, the last axis; NaN where only round 0 is there."""
    count = late_count(rounds)
    late = accuracy[..., len(rounds) - count :]
    return late.mean(axis=-1) if count else np.full(accuracy.shape[:-1], np.nan)


def over_users(accuracy: np.ndarray) -> np.ndarray:
    """Mean over users, the last axis: each counts the same, those without samples (NaN) do not."""
    with np.errstate(invalid="ignore"):
        return np.nansum(accuracy, axis=-1) / np.sum(~np.isnan(accuracy), axis=-1)
