"""Division that must come out even."""


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient.

    Raises:
        ValueError: `denominator` is 0, or does not divide `numerator`.
    """
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator
