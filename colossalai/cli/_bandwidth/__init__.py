"""`colossalai check --bandwidth`: ranks of this machine measure what communication between them costs."""

from colossalai.cli._bandwidth._command import check_bandwidth as check_bandwidth
