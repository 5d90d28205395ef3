"""What watches a job while it runs: sections, the flight recorder, hangs and mismatches by name."""

from colossalai.monitor._collective_check import AgreementCheck as AgreementCheck
from colossalai.monitor._mismatch import DisagreementError as DisagreementError
from colossalai.monitor._options import ACTIONS as ACTIONS
from colossalai.monitor._options import watchdog_options as watchdog_options
from colossalai.monitor._sections import meeting as meeting
from colossalai.monitor._sections import module_at_work as module_at_work
from colossalai.monitor._sections import name_modules as name_modules
from colossalai.monitor._sections import section as section
from colossalai.monitor._sections import still_moving as still_moving
from colossalai.monitor._store import agent_serves as agent_serves
from colossalai.monitor._watchdog import AxisOf as AxisOf
from colossalai.monitor._watchdog import Watchdog as Watchdog
