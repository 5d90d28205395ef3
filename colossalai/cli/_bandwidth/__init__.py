"""`colossalai check --bandwidth`: cost of the communication between ranks of this machine."""

from colossalai.cli._bandwidth._command import check_bandwidth as check_bandwidth
