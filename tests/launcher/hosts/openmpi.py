"""What OpenMPI's mpirun needs to be told on the hosts of a test network."""

import shutil

SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_oob_tcp_if_include": "eth0",
    "OMPI_MCA_plm_rsh_agent": "ssh",
    # Each host believes that it has the machine for itself: all would bind their ranks to the same cores.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def reason_to_skip() -> str:
    """Say why there can be no OpenMPI here; empty if there can."""
    return "" if shutil.which("mpirun") else "not installed: mpirun (Debian: openmpi-bin)"
