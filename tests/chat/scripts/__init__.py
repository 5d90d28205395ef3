"""The scripts of applications/Chat."""
