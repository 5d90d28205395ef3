"""Pre-flight checks: whether all hosts can run a job, found before anything of it starts.

For the package: `preflight` and its request, report and findings, which `colossalai run` and
`colossalai check --doctor` show.
"""

from colossalai.launcher.preflight._findings import Finding as Finding
from colossalai.launcher.preflight._preflight import PreflightReport as PreflightReport
from colossalai.launcher.preflight._preflight import PreflightRequest as PreflightRequest
from colossalai.launcher.preflight._preflight import preflight as preflight
