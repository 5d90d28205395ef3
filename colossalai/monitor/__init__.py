"""Monitor: watches a job while it runs, and names the ranks at fault for a hang or a mismatch.

For users: `section`, `name_modules` and `current_module`, which name activities of their own code. For the
package: the rest; `context` switches the watchdog and the debug mode on and off.

| term | definition |
| --- | --- |
| section | a named part of a step: "the forward", "data loading" |
| meeting | a section in which a thread waits for other ranks by other means than one collective |
| call record | an operation that a rank has issued, from any source |
| channel | a process group's collectives, or the messages from one rank to another; each is counted |
| alarm, notice | set in the store by a rank that has waited too long: for a report, or for one line |
| rank report | the answer of a rank to an alarm: its waits, its last calls, its stacks |
| diagnosis | the ranks at fault, from the reports of all |
| signature | operation, shapes and dtypes of a collective, noted where neighbors can read it |
"""

from colossalai.monitor._calls import AxisOf as AxisOf
from colossalai.monitor._calls import DisagreementError as DisagreementError
from colossalai.monitor._calls import difference as difference
from colossalai.monitor._calls import late_ranks as late_ranks
from colossalai.monitor._calls import lost_ranks as lost_ranks
from colossalai.monitor._collective_check import CollectiveCheck as CollectiveCheck
from colossalai.monitor._flight_recorder import STAMPED_TAGS as STAMPED_TAGS
from colossalai.monitor._flight_recorder import CallLog as CallLog
from colossalai.monitor._flight_recorder import records as records
from colossalai.monitor._options import ACTIONS as ACTIONS
from colossalai.monitor._options import watchdog_options as watchdog_options
from colossalai.monitor._peer_processes import PeerProcess as PeerProcess
from colossalai.monitor._peer_processes import kernel_and_namespace as kernel_and_namespace
from colossalai.monitor._sections import current_meeting as current_meeting
from colossalai.monitor._sections import current_module as current_module
from colossalai.monitor._sections import expected_wait as expected_wait
from colossalai.monitor._sections import meeting as meeting
from colossalai.monitor._sections import name_modules as name_modules
from colossalai.monitor._sections import section as section
from colossalai.monitor._sections import still_moving as still_moving
from colossalai.monitor._store import agent_serves as agent_serves
from colossalai.monitor._watchdog import Watchdog as Watchdog
