"""What is read from the environment of SLURM and OpenMPI; the values are those that real ones have set."""

import socket

import pytest

from colossalai.context._launch_arguments import openmpi_place, slurm_place

pytestmark = pytest.mark.unit

SLURM = {
    "SLURM_JOB_ID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NPROCS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "localhost,host[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
    "SLURM_STEP_NODELIST": "localhost,host7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "210042880.0;tcp://10.77.0.1:56823",
    "PMIX_NAMESPACE": "210042881",
}


def slurm_host(**changes: str | None) -> str:
    return slurm_place(None, None, environment=changed(SLURM, changes)).host


def openmpi_host(**changes: str | None) -> str:
    return openmpi_place(None, None, environment=changed(OPENMPI, changes)).host


def changed(environment: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}


def test_what_is_given_holds_and_the_rest_is_found():
    place = slurm_place("h", 7, environment={**SLURM, "MASTER_ADDR": "m", "MASTER_PORT": "9"})
    assert (place.rank, place.world_size, place.local_rank, place.host, place.port) == (1, 2, 0, "h", 7)
    place = openmpi_place(None, None, environment={**OPENMPI, "MASTER_ADDR": "m", "MASTER_PORT": "9"})
    assert (place.rank, place.world_size, place.local_rank, place.host, place.port) == (1, 2, 0, "m", 9)
    assert slurm_place("h", 0, environment=SLURM).port == 0, "which launch refuses"


def knows_only_localhost(name: str, port: None) -> None:
    if name != "localhost":
        raise socket.gaierror


def test_task_0_of_slurm_is_on_the_first_node_of_the_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "getaddrinfo", knows_only_localhost)
    assert slurm_host() == "localhost"
    assert slurm_host(SLURM_STEP_NUM_NODES="1") == "127.0.0.1"
    assert slurm_host(SLURM_STEP_NODELIST="gpu07,gpu08") == "10.77.0.1"
    assert slurm_host(SLURM_STEP_NODELIST=None) == "10.77.0.1"
    assert slurm_host(SLURM_STEP_NODELIST="gpu[07-08]", SLURM_LAUNCH_NODE_IPADDR=None) == "gpu07"
    with pytest.raises(
        ValueError, match=r"neither SLURM_STEP_NODELIST nor .* give host, the machine of rank 0"
    ):
        slurm_host(SLURM_STEP_NODELIST=None, SLURM_LAUNCH_NODE_IPADDR=None)


def test_a_port_is_the_same_for_all_ranks_and_another_for_another_job():
    ports = {
        slurm_place(None, None, environment={**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port
        for job in "123"
        for step in "012"
    }
    assert len(ports) == 9
    assert all(16384 <= port < 32768 for port in ports)
    first = slurm_place(None, None, environment={**SLURM, "SLURM_PROCID": "0"})
    assert first.port == slurm_place(None, None, environment=SLURM).port
    assert (
        openmpi_place("h", None, environment=OPENMPI).port
        != openmpi_place("h", None, environment={**OPENMPI, "PMIX_NAMESPACE": "210042882"}).port
    )


def test_a_batch_script_is_no_task():
    with pytest.raises(ValueError, match=r"the batch script's, not one of 2 tasks .* start .* with `srun"):
        slurm_host(SLURM_STEP_NUM_TASKS=None)
    assert slurm_host(SLURM_STEP_NUM_TASKS=None, SLURM_NPROCS="1", SLURM_PROCID="0") == "localhost"


def test_ranks_of_openmpi_meet_at_mpirun():
    assert openmpi_host() == "10.77.0.1"
    assert openmpi_host(OMPI_COMM_WORLD_LOCAL_SIZE="2") == "127.0.0.1"
    own = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:2"}
    assert openmpi_host(**own) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"mpirun on another host, at 192.0.2.1, so that .* give host"):
        openmpi_host(OMPI_COMM_WORLD_RANK="0", OMPI_MCA_orte_hnp_uri="1.0;tcp://192.0.2.1:2")
    with pytest.raises(ValueError, match=r"this mpirun does not publish its address .* give host"):
        openmpi_host(OMPI_MCA_orte_hnp_uri=None)


def test_of_several_networks_the_one_that_leads_to_mpirun_is_taken():
    with socket.create_server(("127.0.0.2", 0)) as mpirun:
        uri = f"1.0;tcp://127.0.0.3,127.0.0.2:{mpirun.getsockname()[1]};tcp6://[::1]:9"
        assert openmpi_host(OMPI_MCA_orte_hnp_uri=uri) == "127.0.0.2"


def test_a_port_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="MASTER_PORT is 'auto', not a number"):
        slurm_place("h", None, environment={**SLURM, "MASTER_PORT": "auto"})
