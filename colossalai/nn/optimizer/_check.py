"""Checks of the arguments of optimizers."""


def check_not_negative(**values: float) -> None:
    """Refuse a negative value; each is given under its name.

    Raises:
        ValueError: A value is negative or not a number.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r} is out of range; give a number that is 0 or greater")


def check_decay_rates(**values: float) -> None:
    """Refuse a rate of a running average that is not in [0, 1); each is given under its name.

    Raises:
        ValueError: A rate is not in [0, 1).
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"{name}={value!r} is out of range; give a number from 0 up to, not including, 1"
            )
