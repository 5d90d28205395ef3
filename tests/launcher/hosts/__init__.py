"""Jobs on hosts made of network namespaces, with real sshd, SLURM and OpenMPI."""
