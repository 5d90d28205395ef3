"""Machine profiles: times of operations and communication, measured or from published figures."""

from colossalai.auto_parallel.machine._machine import MachineProfile as MachineProfile
from colossalai.auto_parallel.machine._machine import measure_machine as measure_machine
from colossalai.auto_parallel.machine._machine import shipped_profile as shipped_profile
