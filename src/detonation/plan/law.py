"""The law of rounds: what rounds cost in larger models, and with other numbers of replicas.

The cost of AdamW in rounds falls with the size of the model. A fit to the losses of Charles et al.
(*Scaling laws for DiLoCo*, arXiv 2503.09799, table 4: 35 million to 2.4 billion parameters, 1 to 8
replicas, rounds of 30 steps) is

    ln(loss of R replicas / loss of one replica) = 1.0923 * N ** -0.2342 * ln(R)

for N parameters. Measurements of this project at 0.14 million parameters agree with this law
(docs/findings.md). So the planner converts a measured cost to the model size and the replicas of a
run by this law.
"""

import math

SCALE = 1.0923
EXPONENT = 0.2342
"""Scale and exponent of the law."""
EXPONENTS = (0.15, 0.32)
"""Exponents that give the ends of an interval. Between these two lie the exponents with which costs
measured at 0.14 million parameters (rounds of 30 steps) reach the law at 35 million parameters.
"""
STEEPER = 1.25
"""For each doubling of replicas, a cost may grow by this factor more than the law says. From two to
eight replicas, the measured cost (rounds of 30 steps, AdamW) grew 4.4 times, and the law says 3.
"""
SIZES = (35e6, 2.4e9)
REPLICAS = 8
LONGEST = 30
"""Parameters, replicas and steps of a round for which the law was fitted."""


def cost_of_rounds(parameters: float, replicas: int) -> float:
    """Returns the increase of the loss under rounds of 30 steps, as a fraction of the loss of one
    replica. The law of rounds (see the top of this file) predicts this increase.

    >>> f"{cost_of_rounds(1e9, 8):+.1%}, {cost_of_rounds(125e6, 8):+.1%}"
    '+1.8%, +2.9%'
    """
    return math.expm1(SCALE * parameters**-EXPONENT * math.log(replicas))


def carried(
    cost: float, interval: tuple[float, float], size: float, replicas: tuple[int, int]
) -> tuple[float, tuple[float, float]]:
    """Converts a measured cost of rounds (the relative increase of the loss) and its interval to a
    run with another model size or another number of replicas. Returns the expected cost, and the
    interval of this cost.

    Args:
        cost: Cost of rounds in the measurement.
        interval: The lower and the upper end of the interval of `cost`.
        size: Parameters of the run, divided by the parameters of the measurement.
        replicas: Number of replicas in the measurement, and in the run; both above 1.

    >>> carried(0.19, (0.125, 0.255), 1.0, (8, 8))
    (0.19, (0.125, 0.255))
    """
    before, after = replicas
    times = math.log(after) / math.log(before)
    steeper = STEEPER ** math.log2(after / before)
    factors = [times * size**-exponent * more for exponent in EXPONENTS for more in (1.0, steeper)]
    logs = [math.log1p(max(end, -0.99)) * factor for end in interval for factor in factors]
    expected = math.expm1(math.log1p(cost) * times * size**-EXPONENT)
    return expected, (math.expm1(min(logs)), math.expm1(max(logs)))
