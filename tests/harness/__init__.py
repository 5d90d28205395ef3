"""What runs the tests: reruns of failures, progress of processes, ports, the profile of hypothesis."""
