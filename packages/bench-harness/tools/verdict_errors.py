"""How often ``bench-harness compare`` is wrong: simulated pairs of runs, counted verdicts.

    python packages/bench-harness/tools/verdict_errors.py [--pairs 1000]

Both runs of a pair have the same noise; B's median is 0, 10 or 20 % above A's. Every direction of
equal code is wrong; "gate" is ``--fail-on slower``, which lets 5 % pass. Noises: independent
samples, samples that resemble their neighbours (a first-order autoregressive process, also one of
a machine that wanders slowly and far), one sample in ten up to several times as long, and a clock
that changes once by 10 % at a random sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from bench_harness.verdict import judge

Noise = Callable[[np.random.Generator, int], np.ndarray]


def independent(spread: float) -> Noise:
    """Log-normal samples."""
    return lambda rng, count: np.exp(spread * rng.standard_normal(count))


def autoregressive(spread: float, resemblance: float) -> Noise:
    """Samples whose logarithm is correlated with that of the one before."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        logarithm = rng.standard_normal(count)
        for i in range(1, count):
            fresh = np.sqrt(1 - resemblance**2) * logarithm[i]
            logarithm[i] = resemblance * logarithm[i - 1] + fresh
        return np.exp(spread * logarithm)

    return draw


def outliers(spread: float) -> Noise:
    """One sample in ten takes longer by an exponential share."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        longer = np.where(rng.random(count) < 0.1, 1 + rng.exponential(1.0, count), 1.0)
        return independent(spread)(rng, count) * longer

    return draw


def clock_step(spread: float, size: float) -> Noise:
    """The clock changes once."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        at = rng.integers(0, count)
        return independent(spread)(rng, count) * np.where(np.arange(count) < at, 1.0, 1 + size)

    return draw


NOISES = {
    "independent, 1 %": independent(0.01),
    "independent, 15 %": independent(0.15),
    "neighbours alike, 3 %": autoregressive(0.03, 0.8),
    "wandering, 10 %": autoregressive(0.1, 0.95),
    "outliers, 3 %": outliers(0.03),
    "clock step of 10 %": clock_step(0.01, 0.1),
}


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=300)
    pairs = parser.parse_args().pairs
    print('| noise of both runs | samples | B is slower by | "faster" or "slower" | sure | gate |')
    print("|---|---:|---:|---:|---:|---:|")
    for name, noise in NOISES.items():
        for count in (5, 20, 60):
            for slower in (0.0, 0.1, 0.2):
                rng = np.random.default_rng(count)
                found = [
                    judge(noise(rng, count).tolist(), ((1 + slower) * noise(rng, count)).tolist())
                    for _ in range(pairs)
                ]
                decided = [each for each in found if each.direction in ("faster", "slower")]
                shares = (
                    len(decided),
                    sum(each.sure for each in decided),
                    sum(each.slower_by(0.05) for each in found),
                )
                cells = " | ".join(f"{100 * share / pairs:.1f}" for share in shares)
                print(f"| {name} | {count} | {100 * slower:.0f} % | {cells} |", flush=True)


if __name__ == "__main__":
    main()
