"""What operations and communication take on a machine: measured, or of published figures."""

from colossalai.auto_parallel.machine._machine import MachineProfile as MachineProfile
from colossalai.auto_parallel.machine._machine import measure_machine as measure_machine
from colossalai.auto_parallel.machine._machine import shipped_profile as shipped_profile
