"""Division that must come out even."""


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient.

    Raises:
        ValueError: There is a remainder.
    """
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator
