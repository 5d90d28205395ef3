"""The profile of hypothesis for all tests of properties."""

from hypothesis import HealthCheck, settings

# Nothing depends on how fast the machine is or on which run this is: no limit of time for an example or for
# drawing one, the same examples each time, no database of earlier ones. A failure prints its example and
# how to repeat it.
PROFILE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def load_profile() -> None:
    """Make the profile the default of this process, before tests are imported, whose decorators take it."""
    settings.register_profile("colossalai", PROFILE)
    settings.load_profile("colossalai")
